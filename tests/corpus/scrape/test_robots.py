import asyncio
import time

from yarl import URL

from common.errors import PageError
from corpus.scrape.robots import PathRules, fetch_robots, parse_robots, robots_rules
from corpus.urls.url import Url, parse_url
from tests.corpus.scrape.google_robots import CASES, DEPARTURES

ROBOT = "urls-to-gpt2"


def allowed(text: str | bytes, path: str, robot: str = ROBOT) -> bool:
    """Whether `robot` may fetch a path under this robots.txt, checked as the Fetcher does."""
    body = text if isinstance(text, bytes) else text.encode()
    return parse_robots(body, robot).allows(URL(parse_url(f"http://one.example{path}").text).raw_path_qs)


def test_google_s_questions_have_google_s_answers() -> None:
    for name, robots, agent, *answers in CASES:
        for path in answers[0] + answers[1]:
            departs = (name, path) in DEPARTURES
            assert (allowed(robots, path, agent) == (path in answers[0])) != departs, (name, robots, path)


def test_rules_for_this_robot_win_over_those_for_all_and_those_for_others_are_ignored() -> None:
    text = (
        b"User-agent: OtherBot\nuser agent NewsBot\nDisallow: /\n\n"
        b"User-agent: * # everybody\nDisallow: /everybody/\nCrawl-delay: 2\n\n"
        b"USERAGENT: URLs-to-GPT2*\nDisallow: /*.cgi$\nAllow: /open-to-all/\nCrawl-delay: 7\n"
    )
    asked = ("/", "/everybody/", "/run.cgi", "/open-to-all/run.cgi")
    assert [allowed(text, path) for path in asked] == [True, True, False, True]
    assert [allowed(text, path, "somebody") for path in asked] == [True, False, True, True]
    assert parse_robots(text, ROBOT).crawl_delay == 7 and parse_robots(text, "somebody").crawl_delay == 2
    for agent in ("urls-to-gpt2/0.1", "URLS-TO-GPT2 crawler", "urls-to-*"):
        group = f"User-agent: *\nDisallow:\n\nUser-agent: {agent}\nUser-agent: another\nDisallow: /p\n"
        assert not allowed(group, "/p"), agent
    for agent in ("urls", "urls-to-gpt2-images", "my-urls-to-gpt2", "to-*", ""):
        assert allowed(f"User-agent: {agent}\nDisallow: /\n", "/p"), agent
    assert allowed("User-agent: *\nDisallow: /", "/robots.txt?now") and not allowed("User-agent: *\nDisallow: /", "/")


def test_large_files_take_no_longer_than_their_lines_and_are_read_up_to_the_limit_of_the_rfc() -> None:
    lines = [f"User-agent: *{n}" for n in range(12_000)] + [f"Disallow: /{n}" for n in range(12_000)]
    assert allowed("\n".join(lines), "/page")  # Protego would store 144 million rules
    for pattern in ("/*a{}", "/*{}*b$", "/*.html?*&page={}"):
        rules = robots_rules((pattern.format(number), False) for number in range(8000))
        started = time.process_time()
        assert all(rules.allows(f"/shop/item-{letter}.html?x=1&page=none") for letter in "abcdefghij")
        assert not rules.allows("/shop/a7123.html?b&page=7123b") and time.process_time() - started < 0.05, pattern
    head = b"User-agent: *\nDisallow: /early/\n"
    for rule, filler, answer in ((b"Disallow: /late/\n", 1, False), (b"Disallow: /late/\n", 0, True)):
        text = head + b"#" * (500 * 1024 - len(head) - len(rule) - filler) + b"\n" + rule
        assert not allowed(text + b"Disallow: /", "/early/") and allowed(text + b"more", "/late/") is answer
    text = head[:14] + b"Disallow: /\n" + b"#" * (500 * 1024 - 35) + b"\nAllow: /public/page\n"
    assert text[: 500 * 1024].endswith(b"Allow: /") and not allowed(text, "/secret"), "a line that is cut is ignored"


def answered(*answers: bytes | str) -> PathRules | str:
    """The rules or the reason after these answers: a body, a URL, or `!` and a reason."""
    left = list(answers)

    async def ask(url: Url) -> bytes | str:
        answer = left.pop(0)
        if isinstance(answer, str) and answer.startswith("!"):
            raise PageError(answer[1:])
        return answer

    return asyncio.run(fetch_robots("http://one.example/robots.txt", ROBOT, ask))


def test_what_cannot_be_read_closes_the_host_and_what_is_missing_forbids_nothing() -> None:
    other = "http://other.example/robots.txt"
    codes = [f"!http_{status}" for status in (206, 304, 429, 500, 599)]
    for answer in (*codes, "!bad_encoding", "!too_large", "!timeout", b"\x1f\x8b\x08 compressed"):
        assert answered(answer) == answered(other, answer) == "robots_unreachable", answer
    for reason in ("dns", "tls", "connection", "private_host"):  # the host's own reason
        assert answered(f"!{reason}") == reason
        assert (answered(other, f"!{reason}") == "robots_unreachable") is (reason != "private_host")
    for reason in (*(f"http_{status}" for status in (204, 400, 403, 404, 499)), "redirect_refused"):
        rules = answered(f"!{reason}")
        assert isinstance(rules, PathRules) and rules.allows("/page"), reason
    for redirects, answer in ((5, False), (6, True)):
        rules = answered(*(f"http://host{n}.example/" for n in range(redirects)), b"User-agent: *\nDisallow: /\n")
        assert isinstance(rules, PathRules) and rules.allows("/page") is answer
