import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from yarl import URL

from common.errors import PageError
from common.settings import ScrapeSettings
from corpus.scrape.robots import RobotsRules, fetch_robots, parse_robots
from corpus.urls.url import Url, parse_url
from tests.corpus.scrape.google_robots import CASES, DEPARTURES, Case

ROBOT = "urls-to-gpt2"


def allowed(text: bytes, path: str, robot: str = ROBOT) -> bool:
    """Whether `robot` may fetch a path of a site with this robots.txt, checked as the Fetcher does."""
    return parse_robots(text, robot).allows(URL(parse_url(f"http://one.example{path}").text).raw_path_qs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_google_s_cases_give_google_s_results(case: Case) -> None:
    text = "\n".join(line.strip() for line in case.robots.split("|")).encode()
    for path in (*case.allowed, *case.refused):
        ours = allowed(text, path, case.agent)
        departs = (case.name, path) in DEPARTURES
        assert (ours == (path in case.allowed)) != departs, path


def test_rules_for_this_robot_win_over_those_for_all_and_those_for_others_are_ignored() -> None:
    text = (
        b"User-agent: OtherBot\nuser agent NewsBot\nDisallow: /\n\n"
        b"User-agent: * # everybody\nDisallow: /everybody/\nCrawl-delay: 2\n\n"
        b"USERAGENT: URLs-to-GPT2*\nDisallow: /*.cgi$\nAllow: /open-to-all/\nCrawl-delay: 7\n"
    )
    asked = ("/", "/everybody/", "/run.cgi", "/open-to-all/run.cgi")
    assert [allowed(text, path) for path in asked] == [True, True, False, True]
    assert parse_robots(text, ROBOT).crawl_delay == 7
    assert [allowed(text, path, "somebody") for path in asked] == [True, False, True, True]
    assert parse_robots(text, "somebody").crawl_delay == 2


@pytest.mark.parametrize(
    ("agent", "robot"),
    [
        ("urls-to-gpt2/0.1", ROBOT),
        ("URLS-TO-GPT2 crawler", ROBOT),
        ("urls-to-*", ROBOT),
        ("urls-to-gpt2/0.1 (me@mail.example)", ROBOT),
        ("Mozilla/5.0 (compatible; MyBot/1.0; +http://my.example/)", "MyBot"),
        ("mybot", "MyBot"),
    ],
)
def test_an_agent_line_matches_any_form_of_our_name(agent: str, robot: str) -> None:
    text = f"User-agent: *\nDisallow:\n\nUser-agent: {agent}\nUser-agent: another\nDisallow: /p\n".encode()
    assert not allowed(text, "/p", robot)


@pytest.mark.parametrize("agent", ["urls", "gpt2", "urls-to-gpt2-images", "my-urls-to-gpt2", "Mozilla", "to-*", ""])
def test_an_agent_line_with_another_name_does_not_match(agent: str) -> None:
    assert allowed(f"User-agent: {agent}\nDisallow: /\n".encode(), "/p")


@pytest.mark.parametrize(
    ("user_agent", "name"),
    [
        ("urls-to-gpt2/0.1", "urls-to-gpt2"),
        ("MyBot", "MyBot"),
        ("CCBot/2.0 (https://commoncrawl.org/faq/)", "CCBot"),
        ("Mozilla/5.0 (compatible; MyBot/1.0; +http://my.example/)", "MyBot"),
        ("Mozilla/5.0 (compatible; archive.org_bot +http://archive.org/)", "archive.org_bot"),
        ("Mozilla/5.0 (compatible; http://my.example/bot; MyBot/2)", "MyBot"),
        ("Mozilla/5.0 AppleWebKit/537.36 (KHTML, like Gecko; compatible; bingbot/2.0) Chrome/9 Safari/5", "bingbot"),
        (
            "Mozilla/5.0 (X11; Linux x86_64; Storebot-Google/1.0) AppleWebKit/537.36 Chrome/79 Safari/5",
            "Storebot-Google",
        ),
        ("Mozilla/5.0 (Linux; Android 6; Nexus Build/M) Chrome/9 (compatible; Googlebot/2.1; +http://g/)", "Googlebot"),
        ("Mozilla/5.0 (Macintosh) Version/13.1.1 Safari/605 (Applebot/0.1; +http://a/)", "Applebot"),
        ("Mozilla/5.0 MyBot/1.0 +http://other.example/page", "MyBot"),
    ],
)
def test_our_name_is_the_product_token_of_the_user_agent(user_agent: str, name: str) -> None:
    assert ScrapeSettings(user_agent=user_agent).robot_token == name


def test_a_user_agent_without_a_robot_s_name_is_refused_unless_the_name_is_given() -> None:
    browser = (
        "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120 Safari/537.36"
    )
    with pytest.raises(ValidationError, match="names no robot"):
        ScrapeSettings(user_agent=browser)
    with pytest.raises(ValidationError, match="must be a part of user_agent"):
        ScrapeSettings(robot_name="MyBot")
    assert ScrapeSettings(user_agent=browser, obey_robots=False).robot_token == ""
    assert ScrapeSettings(user_agent="Research crawler MyBot", robot_name="mybot").robot_token == "mybot"


@pytest.mark.parametrize(
    "path",
    r"/p /x/../p /./p /x/%2e%2e/p /%2E/p /../../p /x/.%2e/p/q /x\..\p /%70 /p?q /p#top".split(),
)
def test_no_spelling_of_a_path_evades_a_rule(path: str) -> None:
    assert not allowed(b"User-agent: *\nDisallow: /p\n", path)


@given(st.lists(st.sampled_from([".", "..", "%2e", ".%2E", "p", "x", "", "a%2Fb", "é"]), max_size=6))
@example(["x", "..", "p"])
def test_the_path_that_is_checked_is_the_path_that_is_sent(segments: list[str]) -> None:
    url = parse_url("http://one.example/" + "/".join(segments))
    sent = URL(url.text).raw_path_qs
    assert not {".", "..", "%2e"} & set(sent.lower().split("/"))
    assert parse_url(url.text) == url._replace(length=len(url.text))
    # a rule for exactly the path that is sent forbids it in any spelling
    assert sent == "/robots.txt" or not parse_robots(f"User-agent: *\nDisallow: {sent}$".encode(), ROBOT).allows(sent)


@pytest.mark.parametrize(
    ("rule", "path", "closed"),
    [
        ("/é", "/%C3%A9", True),
        ("/%c3%a9", "/é", True),
        ("/%7Euser", "/~user", True),
        ("/a%3Db", "/a=b", True),
        ("/a%2Fb", "/a/b", False),
        ("/a/b", "/a%2Fb", False),
        ("/a-%2A.html", "/a-*.html", True),
        ("/a-%2A.html", "/a-b.html", False),
        ("/price%24", "/price$list", True),
        ("/price$list", "/price$list", True),
        ("/*?u=/p", "/go?u=%2Fp", True),
        ("/100%", "/100%25", True),
        ("/ private ", "/private", False),
        ("   /private\t", "/private/x", True),
        ("/*/print$", "/a/b/print", True),
        ("/*/print$", "/a/print/b", False),
        ("*.gif$", "/a/b.gif", True),
        ("/a*b*c", "/a-c-b", False),
        ("/a**c$", "/a-b-c", True),
    ],
)
def test_patterns_and_paths_are_normalised_alike(rule: str, path: str, closed: bool) -> None:
    assert allowed(f"User-agent: *\nDisallow: {rule}\n".encode(), path) != closed


def test_bytes_that_are_not_utf8_are_compared_unchanged() -> None:
    text = b"User-agent: *\nDisallow: /caf\xe9/\n"
    assert not allowed(text, "/caf%E9/") and allowed(text, "/caf%E8/") and allowed(text, "/caf%C3%A9/")


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfUser-agent: *\nDisallow: /p\n",
        b"\xef\xbbUser-agent: *\nDisallow: /p\n",
        b"\xefUser-agent: *\nDisallow: /p\n",
        "\ufeffUser-agent: *\nDisallow: /p\n".encode("utf-16-le"),
        "\ufeffUser-agent: *\nDisallow: /p\n".encode("utf-16-be"),
        "\ufeffUser-agent: *\nDisallow: /p\n".encode("utf-32-le"),
        "User-agent: *\nDisallow: /p\n".encode("utf-16-le"),
        b"User-agent: *\rDisallow: /p\r",
        b"User-agent: *\r\nDisallow: /p",
        b"  User-Agent : *  # all\n\n\n\tDISALLOW:/p # this\n",
        b"User-agent: *\n\nDissalow: /p\n",
        b"User-agent: *\nUser-agent: a\nSitemap: x\nNoindex: /q\nCrawl-delay: 1\nUser-agent: b\nDisallow: /p\n",
        b"User-agent: *\nDisallow: /q\nUser-agent: a\nDisallow:\nUser-agent: *\nDisallow: /p\n",
    ],
)
def test_the_first_group_is_obeyed_in_any_encoding_and_spelling(text: bytes) -> None:
    assert not allowed(text, "/p") and allowed(text, "/other")


def test_a_byte_order_mark_inside_a_file_makes_an_unknown_line() -> None:
    assert not allowed(b"User-agent: *\nDisallow: /p\n\xef\xbb\xbfAllow: /p/q\n", "/p/q")


@pytest.mark.parametrize(
    ("lines", "delay"),
    [
        ("User-agent: *\nCrawl-delay: 2", 2),
        ("User-agent: *\nCrawl-delay: 2\nUser-agent: urls-to-gpt2\nCrawl-delay: 7", 7),
        ("User-agent: urls-to-gpt2\nCrawl-delay: 7\nUser-agent: *\nCrawl-delay: 2", 7),
        ("User-agent: *\nCrawl-delay: 2\n\nUser-agent: urls-to-gpt2\nDisallow: /x", 0),
        ("User-agent: *\ncrawl delay 1,5\nCrawl-delay: 0.5 seconds", 1.5),
        ("User-agent: *\nCrawl-delay: soon\nCrawl-delay: -3\nCrawl-delay: nan", 0),
        ("Crawl-delay: 9\nUser-agent: another\nCrawl-delay: 8", 0),
    ],
)
def test_a_crawl_delay_applies_to_the_agents_above_it(lines: str, delay: float) -> None:
    assert parse_robots(lines.encode(), ROBOT).crawl_delay == delay


@pytest.mark.parametrize(
    "agent", ["User-agent: bot{}", "user  agent bot{}", "Useragent:u{}", "User-agent: *{}", "User-agent: ur*{}"]
)
def test_many_agents_with_many_rules_take_no_longer_than_their_lines(agent: str) -> None:
    lines = [agent.format(n) for n in range(12_000)] + [f"Disallow: /{n}" for n in range(12_000)]
    robots = parse_robots("\n".join(lines).encode(), ROBOT)  # Protego would store 144 million rules
    assert robots.allows("/page")


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xfe\x00U\x00", b"<html>not found</html>", b"Disallow: /", b"User-agent:\nDisallow: /"]
)
def test_a_file_that_is_not_a_robots_txt_forbids_nothing(body: bytes) -> None:
    assert allowed(body, "/page")


def test_bytes_beyond_the_limit_of_the_rfc_are_ignored() -> None:
    head = b"User-agent: *\nDisallow: /early/\n"
    robots = parse_robots(head + b"#" * (500 * 1024 - len(head)) + b"\nDisallow: /late/\n", ROBOT)
    assert not robots.allows("/early/")
    assert robots.allows("/late/")


def test_a_line_cut_by_the_limit_is_ignored() -> None:
    head = b"User-agent: *\nDisallow: /\n"
    text = head + b"#" * (500 * 1024 - len(head) - 9) + b"\nAllow: /public/page\n"
    assert text[: 500 * 1024].endswith(b"Allow: /") and not allowed(text, "/secret")


def answered(*answers: bytes | str | PageError) -> RobotsRules | str:
    """The rules or the reason that these responses to robots.txt requests give."""
    left = list(answers)

    async def ask(url: Url) -> bytes | str:
        answer = left.pop(0)
        if isinstance(answer, PageError):
            raise answer
        return answer

    return asyncio.run(fetch_robots(URL("http://one.example"), ROBOT, ask))


@pytest.mark.parametrize(
    "answer",
    [
        *(PageError(f"http_{status}") for status in (101, 206, 304, 429, 500, 503, 599)),
        *(PageError(reason) for reason in ("bad_encoding", "too_large", "timeout")),
        b"\x1f\x8b\x08 a compressed file that no header announced",
    ],
    ids=str,
)
def test_an_unreadable_robots_txt_closes_the_host(answer: bytes | PageError) -> None:
    assert answered(answer) == "robots_unreachable"
    assert answered("http://other.example/robots.txt", answer) == "robots_unreachable"


@pytest.mark.parametrize("reason", ["dns", "tls", "connection", "bad_response", "private_host"])
def test_an_unreachable_host_keeps_its_reason(reason: str) -> None:
    assert answered(PageError(reason)) == reason


@pytest.mark.parametrize("reason", ["http_204", "http_401", "http_403", "http_404", "http_410", "redirect_refused"])
def test_a_host_without_a_robots_txt_forbids_nothing(reason: str) -> None:
    rules = answered(PageError(reason))
    assert isinstance(rules, RobotsRules) and rules.allows("/page")


def test_rules_after_five_redirects_are_obeyed() -> None:
    hops = [f"http://host{n}.example/robots.txt" for n in range(5)]
    rules = answered(*hops, b"User-agent: *\nDisallow: /\n")
    assert isinstance(rules, RobotsRules) and not rules.allows("/page")
