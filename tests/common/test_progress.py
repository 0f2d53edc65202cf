import os

import pytest

from common import cli
from common.console import QUIET, is_quiet
from common.progress import Meter


def test_a_log_gets_a_line_every_thirty_seconds_with_the_rate_since_the_last_one_and_quiet_shows_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def work() -> str:
        with Meter("scrape", "pages", total=1000, done=400) as meter:  # by an earlier run
            for seconds in (29, 1, 29, 1):
                now[0] += seconds
                meter.advance(30, size=15_000_000, note="50 ok, 10 http_404")
        return capsys.readouterr().err

    assert work().splitlines() == [
        "scrape: 460/1000 pages, 2.0/s, 1.00 MB/s, 0:04:30 left; 50 ok, 10 http_404",
        "scrape: 520/1000 pages, 2.0/s, 1.00 MB/s, 0:04:00 left; 50 ok, 10 http_404",
    ]
    monkeypatch.setenv(QUIET, "0")
    cli.parser("corpus.clean", "A step.").parse_args(["--quiet"])
    assert is_quiet() and os.environ[QUIET] == "1", "handed on to other processes"
    assert work() == ""
