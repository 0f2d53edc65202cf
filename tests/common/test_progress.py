"""Progress in logs, and what a Snakemake reads there."""

from pathlib import Path

import pytest

from common.progress import Meter, Running, Ticker


def test_a_log_has_a_line_every_ten_seconds_and_the_last_one_tells_how_far_a_step_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    with Meter("clean", "documents", total=400) as meter:
        for clock[0] in range(1, 101):
            meter.advance(3, 2_000_000)
        meter.note("sorting")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [f"{3 * second}/400" for second in range(10, 101, 10)]
    assert lines[-1] == "clean: 300/400 documents, 3.0/s, 2.00 MB/s, 0:00:33 left; sorting"

    logs = [tmp_path / f"{shard:04}.log" for shard in range(3)]
    logs[0].write_text("".join(f"{line}\n" for line in lines))
    logs[1].write_text("")
    shown = "300/400 documents, 3.0/s, 2.00 MB/s; sorting"  # the bar tells the time left of all jobs
    assert Running("clean", 2, 9, logs).poll() == (2.75, shown, "")


@pytest.mark.parametrize(("left", "name"), [("0:02:08", "train"), ("12 days, 0:02:08", "train")])
def test_a_step_of_one_job_shows_the_time_left_that_the_job_names_and_only_once(
    tmp_path: Path, left: str, name: str
) -> None:
    log = tmp_path / "tiny.log"
    log.write_text(f"tiny: iteration 370/1000, loss 5.3150, {left} left; job 10455 running\n")
    line = "tiny: iteration 370/1000, loss 5.3150; job 10455 running"
    assert Running(name, 0, 1, [log]).poll() == (0.37, line, left)
    assert Running(name, 0, 2, [log]).poll() == (0.37, line, "")


def test_a_waiting_command_prints_at_once_what_is_new_and_else_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    ticker = Ticker()
    for clock[0], news in ((1, "opens"), (2, "opens"), (3, "builds"), (4, ""), (5, ""), (14, ""), (15, "")):
        ticker.show(lambda: f"{clock[0]:.0f}", news)
    assert capsys.readouterr().out.split() == ["1", "3", "4", "14"]
