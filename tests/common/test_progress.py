"""Progress in logs, and what a Snakemake reads there."""

from pathlib import Path

import pytest

from common.progress import Meter, Running


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
    assert Running("clean", 2, 9, logs).poll() == (2.75, lines[-1].removeprefix("clean: "))
