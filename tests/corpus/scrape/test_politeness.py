"""Retries, robots.txt, delays, and the number of requests at once."""

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise

import pytest

from corpus.scrape.response import FetchedPage
from tests import rude_server as rude
from tests.corpus.scrape.fetching import HTML, Visits, fetch, settings_for
from tests.rude_server import Behaviour, redirect, reply, rude_server

OK = reply(HTML)
BUSY = reply(status="503 Service Unavailable")
ONE, OTHER = "http://one.example/", "http://one.example/other"


def asked_to_wait(value: str) -> Behaviour:
    return reply(status="429 Too Many Requests", Retry_After=value)


def robots(text: str) -> Behaviour:
    return reply(text.encode(), Content_Type="text/plain")


def test_transient_failures_are_retried_and_others_are_not(visits: Visits) -> None:
    behaviours = {
        "mends.example/": rude.in_turn(BUSY, rude.reset, asked_to_wait(""), OK),
        "stays.example/": BUSY,
        "gone.example/": reply(status="404 Not Found"),
        "odd.example/": reply(status="499 Odd"),
    }
    with rude_server(behaviours) as server:
        outcomes = visits.fetch(server, *(f"http://{name}" for name in behaviours), retries=3)
        assert outcomes == ["page", "http_503", "http_404", "http_499"]
        assert [server.requested.count(route) for route in behaviours] == [4, 4, 1, 1]


def test_a_host_is_asked_once_per_delay_and_a_longer_crawl_delay_wins(visits: Visits) -> None:
    pages = {f"one.example/{n}": visits.noted(OK) for n in range(4)}
    urls = [f"http://{name}" for name in pages]
    with rude_server(pages) as server:
        assert visits.fetch(server, *urls, host_delay=1.5) == ["page"] * 4
    assert visits.times == [0, 1.5, 3, 4.5]
    for delay, rest in ((2, 2), (0.5, 1)):
        pages["one.example/robots.txt"] = visits.noted(robots(f"User-agent: *\nCrawl-delay: {delay}\n"))
        with rude_server(pages) as server:
            visits.fetch(server, *urls[:3], host_delay=1, obey_robots=True)
        # the request for robots.txt itself knows only host_delay
        assert visits.times == [0, 1, 1 + rest, 1 + 2 * rest]


def test_retries_back_off_by_a_jittered_delay_that_doubles(visits: Visits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: low + high)
    with rude_server({"one.example/": visits.noted(BUSY), "one.example/other": visits.noted(OK)}) as server:
        assert visits.fetch(server, ONE, OTHER, retries=3, retry_delay=0.1) == ["http_503", "page"]
    # the whole host waits; the jitter is a factor of 1 to 1.25, of which the sum is used here
    assert sorted({later - earlier for earlier, later in pairwise(visits.times)}) == pytest.approx(
        [0, 0.225, 0.45, 0.9]
    )


def test_retry_after_is_honoured_up_to_five_minutes(visits: Visits) -> None:
    with rude_server({"one.example/": rude.in_turn(*map(visits.noted, (asked_to_wait("300"), OK)))}) as server:
        assert visits.fetch(server, ONE) == ["page"] and visits.times == [0, 300]
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=200), usegmt=True)
    with rude_server({"one.example/": rude.in_turn(*map(visits.noted, (asked_to_wait(date), OK)))}) as server:
        assert visits.fetch(server, ONE) == ["page"] and 140 < visits.times[1] <= 200
    for delay, outcome in ((300, "page"), (301, "crawl_delay")):
        pages = {"one.example/robots.txt": robots(f"User-agent: *\nCrawl-delay: {delay}\n"), "one.example/": OK}
        with rude_server(pages) as server:
            assert visits.fetch(server, ONE, obey_robots=True) == [outcome]
    # a host that asks for more is given up for this page, and rests before the next one
    long = visits.noted(asked_to_wait("301"))
    with rude_server({"one.example/": long, "one.example/other": long}) as server:
        assert visits.fetch(server, ONE, OTHER) == ["http_429", "http_429"] and visits.times == [0, 300]


@pytest.mark.parametrize(("hosts", "most"), [(1, 1), (30, 6)])
def test_at_most_one_request_per_host_and_concurrency_in_all_run_at_once(hosts: int, most: int) -> None:
    under_way = busiest = 0
    full = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, busiest
        under_way += 1
        busiest = max(busiest, under_way)
        if under_way == most:
            full.set()
        await full.wait()
        await asyncio.sleep(0.01)
        under_way -= 1
        await OK(writer)

    pages = {f"site{n % hosts}.example/{n}": slow for n in range(30)}
    with rude_server(pages) as server:
        settings = settings_for(server, obey_robots=False, concurrency=6)
        outcomes = fetch(settings, *(f"http://{name}" for name in pages))
    assert all(isinstance(page, FetchedPage) for page in outcomes) and busiest == most


def test_robots_txt_is_obeyed_and_fetched_once_per_host() -> None:
    rules = "User-agent: *\nDisallow: /\n\nUser-agent: urls-to-gpt2\nDisallow: /private/\n"
    behaviours = {
        "open.example/robots.txt": robots(rules),
        "open.example/go": redirect("/x/..%2Fy/../../private/"),
        "moved.example/robots.txt": redirect("https://open.example/robots.txt"),
        "broken.example/robots.txt": reply(status="500 Oops"),
        "sent.example/robots.txt": redirect("http://ill.other/robots.txt"),
        "ill.other/robots.txt": rude.reset,
    }
    forbidden = ["open.example/private/page", "open.example/x/%2e%2e/%70rivate/", "moved.example/private/"]
    names = ["open.example/page", "none.example/page", *forbidden, "open.example/go"]
    pages = dict.fromkeys([*names, "broken.example/", "sent.example/"], OK)
    with rude_server({**pages, **behaviours, "hanging.example/robots.txt": rude.silence}) as server:
        urls = [f"https://{name}" for name in pages]
        outcomes = fetch(settings_for(server, retries=1, contact="me@mail.example"), *urls, *urls)
        hanging = settings_for(server, 3, retries=1, contact="me@mail.example")
        assert fetch(hanging, *["https://hanging.example/"] * 2) == ["robots_unreachable"] * 2
        asked = server.requested
    assert all("User-Agent: urls-to-gpt2/0.1 (me@mail.example)" in head for head in server.heads)
    results = ["page" if isinstance(outcome, FetchedPage) else outcome for outcome in outcomes]
    assert results == ["page", "page", *["robots"] * 4, *["robots_unreachable"] * 2] * 2
    assert asked.count("none.example/robots.txt") == asked.count("moved.example/robots.txt") == 1
    assert asked.count("broken.example/robots.txt") == asked.count("hanging.example/robots.txt") == 2  # once more
    assert {name for name in pages if name in asked} == {"open.example/page", "none.example/page", "open.example/go"}
