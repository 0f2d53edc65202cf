import pytest

from corpus.robots import parse_robots

ROBOT = "urls-to-gpt2"


def test_rules_for_this_robot_win_over_those_for_all_and_those_for_others_are_ignored() -> None:
    text = (
        b"User-agent: OtherBot\nuser agent NewsBot\nDisallow: /\n\n"
        b"User-agent: * # everybody\nDisallow: /everybody/\nCrawl-delay: 2\n\n"
        b"USERAGENT: URLs-to-GPT2*\nDisallow: /*.cgi$\nAllow: /open-to-all/\nCrawl-delay: 7\n"
    )
    robots = parse_robots(text, ROBOT)
    asked = ("/", "/everybody/", "/run.cgi", "/open-to-all/run.cgi")
    assert [robots.can_fetch(f"https://one.example{path}", ROBOT) for path in asked] == [True, True, False, True]
    assert robots.crawl_delay(ROBOT) == 7
    stranger = parse_robots(text, "somebody")
    assert [stranger.can_fetch(f"https://one.example{path}", "somebody") for path in asked] == [True, False, True, True]
    assert stranger.crawl_delay("somebody") == 2


@pytest.mark.parametrize(
    "agent", ["User-agent: bot{}", "user  agent bot{}", "Useragent:u{}", "User-agent: *{}", "User-agent: ur*{}"]
)
def test_many_agents_with_many_rules_take_no_longer_than_their_lines(agent: str) -> None:
    lines = [agent.format(n) for n in range(12_000)] + [f"Disallow: /{n}" for n in range(12_000)]
    # Protego alone would keep 144 million rules
    robots = parse_robots("\n".join(lines).encode(), ROBOT)
    assert robots.can_fetch("https://one.example/page", ROBOT)


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xfe\x00U\x00", b"<html>not found</html>", b"Disallow: /", b"User-agent:\nDisallow: /"]
)
def test_what_is_no_robots_txt_forbids_nothing(body: bytes) -> None:
    assert parse_robots(body, ROBOT).can_fetch("https://one.example/page", ROBOT)


def test_bytes_beyond_the_limit_of_the_standard_are_not_read() -> None:
    head = b"User-agent: *\nDisallow: /early/\n"
    robots = parse_robots(head + b"#" * (500 * 1024 - len(head)) + b"\nDisallow: /late/\n", ROBOT)
    assert not robots.can_fetch("https://one.example/early/", ROBOT)
    assert robots.can_fetch("https://one.example/late/", ROBOT)
