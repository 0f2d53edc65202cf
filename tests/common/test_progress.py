import os
from collections.abc import Callable

import pytest

from common import cli
from common.console import QUIET, is_quiet
from common.progress import Meter, Ticker, count_bytes


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that only advances when this function is called."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_log_gets_a_line_every_thirty_seconds_with_the_rate_since_the_last_one(
    capsys: pytest.CaptureFixture[str], pass_time: Callable[[float], None]
) -> None:
    with Meter("clean", "documents") as meter:
        for _ in range(95):
            pass_time(1)
            meter.advance(2)
    with Meter("scrape", "pages", total=1000) as meter:
        meter.advance(250, size=30_000_000, note="240 ok, 10 http_404")
        pass_time(30)
        meter.advance(50)
    with Meter("scrape", "pages", total=1000, done=400) as meter:  # by an earlier run
        for done in (60, 30, 0):
            pass_time(30)
            meter.advance(done)
    with count_bytes("merge", 90_000_000) as advance:
        advance(43_500_000)
        pass_time(30)
        advance(1_500_000)
    with Meter("train", "iterations", total=90, lines=False) as meter:  # a command with log lines of its own
        pass_time(60)
        meter.advance()
    assert capsys.readouterr().err.splitlines() == [
        *(f"clean: {60 * n} documents, 2.0/s" for n in (1, 2, 3)),
        "scrape: 300/1000 pages, 10.0/s, 1.00 MB/s, 0:01:10 left; 240 ok, 10 http_404",
        "scrape: 460/1000 pages, 2.0/s, 0:04:30 left",
        "scrape: 490/1000 pages, 1.0/s, 0:08:30 left",
        "scrape: 490/1000 pages, 0.0/s",
        "merge: 45/90 MB, 1.5/s, 0:00:30 left",
    ]


def test_a_command_that_waits_prints_a_line_every_thirty_seconds_and_quiet_shows_nothing(
    capsys: pytest.CaptureFixture[str], pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticker = Ticker()
    for second in range(1, 70):
        pass_time(1)
        ticker.show(lambda: f"second {second}")  # noqa: B023
    assert capsys.readouterr().out == "second 30\nsecond 60\n"
    monkeypatch.setenv(QUIET, "0")
    parser = cli.parser("corpus.dedup", "Remove duplicates.")
    parser.add_subparsers(dest="verb").add_parser("run").add_argument("--input")
    assert not is_quiet()
    assert vars(parser.parse_args(["run", "--quiet", "--input", "x"])) == {"verb": "run", "input": "x"}
    assert is_quiet() and os.environ[QUIET] == "1", "handed on to other processes"
    ticker = Ticker()
    with Meter("clean", "documents", total=90) as meter:
        for _ in range(90):
            pass_time(1)
            meter.advance()
            ticker.show(lambda: "never")
    assert capsys.readouterr() == ("", "")
