import argparse

import pytest

from benchmarks import workers
from benchmarks.workers import Run, add_options, measure


def test_every_step_is_measured_with_one_and_with_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = workers._run, []

    def run(command: list[object], count: int) -> Run:
        asked.append((command, count))
        if len(asked) <= 2:  # one step is enough to see that commands run
            assert real(command, count).cpu > 0
        return Run(3.0 / count, float(count))

    monkeypatch.setattr(workers, "_run", run)
    parser = argparse.ArgumentParser()
    add_options(parser)
    result = measure(parser.parse_args(["--small", "1", "--large", "3", "--rounds", "1"]))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.splitlines() if "|" in line][2:]
    steps = ["clean", "dedup run", "decontaminate run", "tokenize"]
    assert [(row[0], row[1]) for row in rows] == [(step, kind) for kind in ("40 small", "4 large") for step in steps]
    assert {(row[5], row[8]) for row in rows} == {("0.50", "2.00")} and "MB" in result
