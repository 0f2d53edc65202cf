import os
from collections.abc import Callable

import pytest

from common import cli
from common.console import QUIET, is_quiet
from common.progress import Meter, Ticker


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that only advances when this function is called."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_log_gets_a_line_every_thirty_seconds_with_the_rate_since_the_last_one_and_quiet_shows_nothing(
    capsys: pytest.CaptureFixture[str], pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        ticker = Ticker()
        with Meter("clean", "documents") as meter:
            for second in range(1, 65):
                pass_time(1)
                meter.advance(2)
                ticker.show(f"second {second}".format)
        with Meter("scrape", "pages", total=1000, done=400) as meter:  # by an earlier run
            pass_time(30)
            meter.advance(60, size=30_000_000, note="50 ok, 10 http_404")

    work()
    output, errors = capsys.readouterr()
    assert output == "second 30\nsecond 60\n"
    assert errors.splitlines() == [
        "clean: 60 documents, 2.0/s",
        "clean: 120 documents, 2.0/s",
        "scrape: 460/1000 pages, 2.0/s, 1.00 MB/s, 0:04:30 left; 50 ok, 10 http_404",
    ]
    monkeypatch.setenv(QUIET, "0")
    assert not is_quiet()
    cli.parser("corpus.clean", "A step.").parse_args(["--quiet"])
    assert is_quiet() and os.environ[QUIET] == "1", "handed on to other processes"
    work()
    assert capsys.readouterr() == ("", "")
