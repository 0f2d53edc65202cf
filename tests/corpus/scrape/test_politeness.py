"""Retries, robots.txt, delays, and the number of requests at once."""

import asyncio
import gzip
import itertools
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from common.settings import BlacklistSettings, ScrapeSettings
from corpus.scrape.fetch import Fetcher
from corpus.scrape.response import FetchedPage
from corpus.urls.rules import UrlRules
from tests import rude_server as rude
from tests.corpus.scrape.fetching import HTML, fetch, settings_for
from tests.rude_server import redirect, reply, rude_server


def test_transient_failures_are_retried() -> None:
    broken = reply(status="503 Service Unavailable")
    behaviours = {
        "mends.example/": rude.in_turn(broken, rude.reset, reply(HTML)),
        "stays.example/": broken,
        "gone.example/": reply(status="404 Not Found"),
    }
    with rude_server(behaviours) as server:
        settings = settings_for(server, obey_robots=False)
        mended, stays, gone = fetch(settings, *(f"http://{name}" for name in behaviours))
        asked = {route: server.requested.count(route) for route in behaviours}
    assert isinstance(mended, FetchedPage) and (stays, gone) == ("http_503", "http_404")
    assert asked == {"mends.example/": 3, "stays.example/": 3, "gone.example/": 1}


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured(form: str) -> None:
    # the date has whole seconds: two ahead leave at least one
    wait = "1" if form == "seconds" else format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    busy = reply(status="429 Too Many Requests", Retry_After=wait)
    with rude_server({"busy.example/": rude.in_turn(busy, reply(HTML))}) as server:
        started = time.monotonic()
        (page,) = fetch(settings_for(server, obey_robots=False), "http://busy.example/")
        assert isinstance(page, FetchedPage) and 0.9 < time.monotonic() - started < 30


def test_a_retry_after_of_an_hour_is_not_waited_for() -> None:
    busy = reply(status="429 Too Many Requests", Retry_After="3600")
    with rude_server({"busy.example/": busy}) as server:
        assert fetch(settings_for(server, obey_robots=False), "http://busy.example/") == ["http_429"]
        assert server.requested == ["busy.example/"]


@pytest.mark.parametrize("value", ["9" * 20, "9" * 5000, "Wed, 21 Oct 99999999999 07:28:00 GMT", "\u00fc", "-1", "nan"])
def test_a_nonsensical_retry_after_is_a_429_like_any_other(value: str) -> None:
    with rude_server({"busy.example/": reply(status="429 Too Many Requests", Retry_After=value)}) as server:
        assert fetch(settings_for(server, obey_robots=False, retries=1), "http://busy.example/") == ["http_429"]


def test_a_busy_host_rests_for_the_longest_wait_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus.scrape.fetch._MAX_WAIT", 0.5)
    times: list[float] = []

    async def busy(writer: asyncio.StreamWriter) -> None:
        times.append(time.monotonic())
        await reply(status="429 Too Many Requests", Retry_After="3600")(writer)

    with rude_server({"busy.example/1": busy, "busy.example/2": busy}) as server:
        urls = ["http://busy.example/1", "http://busy.example/2"]
        assert fetch(settings_for(server, obey_robots=False), *urls) == ["http_429", "http_429"]
    assert len(times) == 2 and times[1] - times[0] > 0.45


def test_retries_back_off_by_a_jittered_delay_that_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: 1.5 if low < 1.5 else low)  # replaces the jitter
    times: list[float] = []

    async def busy(writer: asyncio.StreamWriter) -> None:
        times.append(time.monotonic())
        await reply(status="503 Service Unavailable")(writer)

    with rude_server({"busy.example/": busy, "busy.example/other": reply(HTML)}) as server:
        settings = settings_for(server, obey_robots=False, retries=3, retry_delay=0.1)
        urls = ["http://busy.example/", "http://busy.example/other"]
        failed, other = fetch(settings, *urls)
        requested = server.requested
    assert failed == "http_503" and isinstance(other, FetchedPage)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) == 3 and all(gap > 0.95 * 1.5 * 0.1 * 2**n for n, gap in enumerate(gaps)), gaps
    assert requested.count("busy.example/other") == 1


def test_robots_txt_is_obeyed_and_fetched_once_per_host() -> None:
    rules = b"User-agent: *\nDisallow: /\n\nUser-agent: urls-to-gpt2\nDisallow: /private/\n"
    behaviours = {
        "open.example/robots.txt": reply(rules, Content_Type="text/plain"),
        "moved.example/robots.txt": redirect("https://open.example/robots.txt"),
        "broken.example/robots.txt": reply(status="500 Oops"),
        "hanging.example/robots.txt": rude.silence,
    }
    names = ["open.example/page", "open.example/private/page", "moved.example/private/", "none.example/page"]
    pages = {name: reply(HTML) for name in [*names, "broken.example/", "hanging.example/"]}
    with rude_server({**behaviours, **pages}) as server:
        urls = [f"https://{name}" for name in pages]
        outcomes = fetch(settings_for(server, retries=1), *urls, *urls)
        asked = server.requested
    results = ["page" if isinstance(outcome, FetchedPage) else outcome for outcome in outcomes]
    assert results == ["page", "robots", "robots", "page", "robots_unreachable", "robots_unreachable"] * 2
    assert asked.count("none.example/robots.txt") == asked.count("moved.example/robots.txt") == 1
    assert asked.count("broken.example/robots.txt") == 2 and "broken.example/" not in asked
    assert "open.example/private/page" not in asked


def test_no_spelling_or_redirect_leads_to_a_path_that_robots_txt_forbids() -> None:
    behaviours = {
        "one.example/robots.txt": reply(b"\xef\xbb\xbfUser-agent: *\nDisallow: /p\n", Content_Type="text/plain"),
        "one.example/go": redirect("/x/..%2Fy/../../p"),
        "one.example/q": reply(HTML),
    }
    detours = ("x/../p", "./p", "x/%2e%2e/p", "x\\..\\p", "%70", "go")
    with rude_server(behaviours) as server:
        urls = [f"http://one.example/{path}" for path in (*detours, "x/./../q")]
        *closed, opened = fetch(settings_for(server), *urls)
        requested = set(server.requested)
    assert closed == ["robots"] * len(detours)
    assert isinstance(opened, FetchedPage) and opened.url == "http://one.example/q"
    assert requested == set(behaviours)


def test_a_robots_txt_that_cannot_be_decoded_closes_its_host() -> None:
    rules = b"User-agent: *\nDisallow:\n"
    broken = {
        "cut.example": reply(gzip.compress(rules)[:-9], Content_Encoding="gzip"),
        "odd.example": reply(rules, Content_Encoding="nonsense"),
        "bare.example": reply(gzip.compress(rules)),
    }
    pages = {f"{name}/": reply(HTML) for name in broken}
    with rude_server({**pages, **{f"{name}/robots.txt": answer for name, answer in broken.items()}}) as server:
        assert fetch(settings_for(server), *(f"http://{name}" for name in pages)) == ["robots_unreachable"] * 3
        assert not set(pages) & set(server.requested)


def test_a_robot_that_looks_like_a_browser_obeys_the_rules_for_its_name() -> None:
    rules = b"User-agent: Mozilla\nAllow: /\n\nUser-agent: MyBot/1.0\nDisallow: /p\n"
    behaviours = {"one.example/robots.txt": reply(rules), "one.example/p": reply(HTML), "one.example/q": reply(HTML)}
    with rude_server(behaviours) as server:
        settings = settings_for(server, user_agent="Mozilla/5.0 (compatible; MyBot/1.0; +http://my.example/)")
        closed, opened = fetch(settings, "http://one.example/p", "http://one.example/q")
    assert closed == "robots" and isinstance(opened, FetchedPage)


def test_a_host_gets_one_request_at_a_time_with_its_delay_between() -> None:
    under_way = busiest = 0
    times: list[float] = []

    async def slow(writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, busiest
        times.append(time.monotonic())
        under_way += 1
        busiest = max(busiest, under_way)
        await asyncio.sleep(0.05)
        under_way -= 1
        await reply(HTML)(writer)

    pages = {f"one.example/{n}": slow for n in range(8)}
    with rude_server(pages) as server:
        settings = settings_for(server, obey_robots=False, host_delay=0.15, page_timeout=20)
        outcomes = fetch(settings, *(f"http://{name}" for name in pages))
    assert all(isinstance(page, FetchedPage) for page in outcomes)
    assert busiest == 1
    waits = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    assert waits[len(waits) // 2] > 0.13  # the median: a busy machine sees some requests late


def test_at_most_concurrency_requests_run_at_once() -> None:
    under_way = busiest = 0

    async def slow(writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, busiest
        under_way += 1
        busiest = max(busiest, under_way)
        await asyncio.sleep(0.05)
        under_way -= 1
        await reply(HTML)(writer)

    with rude_server({f"site{n}.example/": slow for n in range(30)}) as server:
        settings = settings_for(server, obey_robots=False, concurrency=6, page_timeout=20)
        outcomes = fetch(settings, *(f"http://site{n}.example/" for n in range(30)))
    assert all(isinstance(page, FetchedPage) for page in outcomes) and busiest == 6


def test_a_request_names_its_sender_and_sends_no_cookie_back() -> None:
    page = reply(HTML, Set_Cookie="who=you; Path=/")
    with rude_server({"one.example/": page, "one.example/2": page}) as server:
        settings = settings_for(server, obey_robots=False, contact="me@mail.example", user_agent="robot/1.5")
        fetch(settings, "http://one.example/", "http://one.example/2")
    for head in server.heads:
        assert "User-Agent: robot/1.5 (me@mail.example)" in head and not [line for line in head if "ookie" in line]
    assert len(server.heads) == 2


def test_an_unforeseen_exception_has_a_reason_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def choke(*_: object) -> None:
        raise LookupError("never heard of it")

    with rude_server({"one.example/": reply(HTML)}) as server:
        monkeypatch.setattr("corpus.scrape.fetch.registered_domain", choke)
        assert fetch(settings_for(server), "http://one.example/") == ["unexpected"]
    assert "warning: http://one.example/: LookupError: never heard of it" in capsys.readouterr().err


def test_a_crawl_delay_is_honoured_unless_it_is_absurd() -> None:
    def robots(delay: str) -> rude.Behaviour:
        return reply(f"User-agent: *\nCrawl-delay: {delay}\n".encode(), Content_Type="text/plain")

    pages = {"slow.example/1": reply(HTML), "slow.example/2": reply(HTML), "never.example/": reply(HTML)}
    rules = {"slow.example/robots.txt": robots("0.4"), "never.example/robots.txt": robots("86400")}
    with rude_server({**pages, **rules}) as server:
        started = time.monotonic()
        first, second, never = fetch(settings_for(server), *(f"http://{name}" for name in pages))
        assert 0.35 < time.monotonic() - started < 30
    assert isinstance(first, FetchedPage) and isinstance(second, FetchedPage) and never == "crawl_delay"


def test_an_endless_robots_txt_closes_its_host_within_the_deadline() -> None:
    rude_ones = {"drip.example": rude.drip, "endless.example": rude.endless, "bomb.example": rude.gzip_bomb(50_000_000)}
    pages = {f"{name}/robots.txt": behaviour for name, behaviour in rude_ones.items()}
    pages |= {f"{name}/": reply(HTML) for name in rude_ones}
    with rude_server(pages) as server:
        outcomes = fetch(settings_for(server, retries=1, max_bytes=100_000), *(f"http://{name}/" for name in rude_ones))
        assert outcomes == ["robots_unreachable"] * 3
        assert not {f"{name}/" for name in rude_ones} & set(server.requested)


def test_a_robots_txt_that_redirects_to_a_failing_host_gives_no_permission() -> None:
    pages = {"one.example/robots.txt": redirect("http://ill.other/robots.txt"), "one.example/": reply(HTML)}
    with rude_server({**pages, "ill.other/robots.txt": rude.reset}) as server:
        assert fetch(settings_for(server, retries=0), "http://one.example/") == ["robots_unreachable"]


def test_the_number_of_host_states_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus.scrape.fetch._MAX_HOSTS", 5)
    pages = {f"site{n}.example/{k}": rude.kept(HTML) for n in range(40) for k in range(3)}

    async def one_after_the_other(settings: ScrapeSettings) -> int:
        async with Fetcher(settings, UrlRules(BlacklistSettings())) as fetcher:
            for name in pages:
                await fetcher.fetch(f"http://{name}")
                fetcher.slots.release()
            return len(fetcher._hosts)

    with rude_server(pages) as server:
        assert asyncio.run(one_after_the_other(settings_for(server))) == 5
        # all at once: no host is dropped while it is in use
        outcomes = fetch(settings_for(server), *(f"http://{name}" for name in pages))
        assert all(isinstance(page, FetchedPage) for page in outcomes)
        requested = server.requested
    assert requested.count("site7.example/robots.txt") == 2  # once per run
