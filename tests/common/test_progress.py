import contextlib
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from common import cli
from common.console import QUIET, is_quiet
from common.progress import Meter, Ticker, count_bytes
from tests.conftest import ROOT


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that only advances when this function is called."""
    now = 1000.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.monotonic", lambda: now)
    return advance


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_log_gets_a_line_every_thirty_seconds(
    capsys: pytest.CaptureFixture[str], pass_time: Callable[[float], None]
) -> None:
    with Meter("clean", "documents") as meter:
        for _ in range(95):
            pass_time(1)
            meter.advance(2)
    assert lines(capsys) == [f"clean: {60 * n} documents, 2.0/s" for n in (1, 2, 3)]


def test_a_line_has_bytes_time_left_and_a_note_where_they_are_known(
    capsys: pytest.CaptureFixture[str], pass_time: Callable[[float], None]
) -> None:
    with Meter("scrape", "pages", total=1000) as meter:
        meter.advance(250, size=30_000_000, note="240 ok, 10 http_404")
        pass_time(30)
        meter.advance(50)
    assert lines(capsys) == ["scrape: 300/1000 pages, 10.0/s, 1.00 MB/s, 0:01:10 left; 240 ok, 10 http_404"]


def test_what_an_earlier_run_did_and_what_was_long_ago_count_for_no_rate(
    capsys: pytest.CaptureFixture[str], pass_time: Callable[[float], None]
) -> None:
    with Meter("scrape", "pages", total=1000, done=400) as meter:
        pass_time(30)
        meter.advance(60)
        pass_time(30)
        meter.advance(30)
    assert lines(capsys) == [
        "scrape: 460/1000 pages, 2.0/s, 0:04:30 left",
        "scrape: 490/1000 pages, 1.0/s, 0:08:30 left",
    ]


def test_a_step_that_waits_goes_on_reporting(
    capsys: pytest.CaptureFixture[str], pass_time: Callable[[float], None]
) -> None:
    with Meter("scrape", "pages", total=1000) as meter:
        meter.advance(5)
        for _ in range(60):
            pass_time(1)
            meter.advance(0)
    assert lines(capsys) == ["scrape: 5/1000 pages, 0.2/s, 1:39:30 left", "scrape: 5/1000 pages, 0.0/s"]


def test_a_terminal_shows_a_bar_with_figures_and_is_left_clean() -> None:
    script = (
        "import time\n"
        "from common.progress import Meter\n"
        "with Meter('scrape', 'pages', total=40) as meter:\n"
        "    for n in range(12):\n"
        "        time.sleep(0.15)\n"
        "        meter.advance(size=1_000_000, note=f'{n} ok, 3 http_404')\n"
    )
    terminal, ours = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", script], stderr=ours, env=environment):
        os.close(ours)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the terminal was closed
            while data := os.read(terminal, 4096):
                shown += data
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "scrape (pages)" in text and "12/40" in text
    assert re.search(r"\n\d\.\d/s, \d\.\d\d MB/s, 0:00:\d\d left; \d+ ok, 3 http_404", text), text
    assert shown.endswith(b"\x1b[1A\x1b[2K\x1b[1A\x1b[2K")  # both lines are erased


def test_bytes_are_counted_in_megabytes(capsys: pytest.CaptureFixture[str], pass_time: Callable[[float], None]) -> None:
    with count_bytes("merge", 90_000_000) as advance:
        for _ in range(29):
            advance(1_500_000)
        pass_time(30)
        advance(1_500_000)
    assert lines(capsys) == ["merge: 45/90 MB, 1.5/s, 0:00:30 left"]


@pytest.mark.parametrize("value", ["1", "yes"])
def test_quiet_shows_nothing(
    value: str,
    capsys: pytest.CaptureFixture[str],
    pass_time: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(QUIET, value)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    ticker = Ticker()
    with Meter("clean", "documents", total=90) as meter:
        for _ in range(90):
            pass_time(1)
            meter.advance()
            ticker.show(lambda: "never")
    assert capsys.readouterr() == ("", "")


def test_a_command_with_log_lines_of_its_own_shows_only_a_bar(
    capsys: pytest.CaptureFixture[str], pass_time: Callable[[float], None]
) -> None:
    with Meter("train", "iterations", total=90, lines=False) as meter:
        pass_time(60)
        meter.advance()
    assert lines(capsys) == []


def test_a_command_that_waits_prints_a_line_every_thirty_seconds(
    capsys: pytest.CaptureFixture[str], pass_time: Callable[[float], None]
) -> None:
    reader, terminal = os.pipe()
    ticker = Ticker(terminal)
    for second in range(1, 70):
        pass_time(1)
        ticker.show(lambda: f"second {second}")  # noqa: B023
    os.close(terminal)
    with os.fdopen(reader) as shown:
        assert shown.read() == capsys.readouterr().out == "second 30\nsecond 60\n"


def test_every_command_has_the_option_quiet_and_hands_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUIET, "0")
    parser = cli.parser("corpus.dedup", "Remove duplicates.")
    verb = parser.add_subparsers(dest="verb").add_parser("run")
    verb.add_argument("--input")
    assert not is_quiet()
    assert vars(parser.parse_args(["run", "--quiet", "--input", "x"])) == {"verb": "run", "input": "x"}
    assert is_quiet() and os.environ[QUIET] == "1"


def test_progress_is_shown_by_one_module() -> None:
    """Whatever else asks for a terminal formats results or guards signals."""
    allowed = {
        "common/progress.py",
        "common/stats.py",
        "cluster/watch.py",
        "training/monitoring/stop.py",
    }
    packages = ("common", "corpus", "training", "convert", "cluster", "report", "demo")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    asking = {str(path.relative_to(ROOT)) for path in files if "isatty(" in path.read_text(encoding="utf-8")}
    assert asking <= allowed
    drawing = {str(p.relative_to(ROOT)) for p in files if "rich.progress" in p.read_text(encoding="utf-8")}
    assert drawing == {"common/progress.py"}
