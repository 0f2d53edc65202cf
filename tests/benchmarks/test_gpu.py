"""benchmarks.gpu at toy size on a CPU: every table is filled, with no package that a bare GPU machine may lack."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu.__main__ import PARTS, Report, measure, plan, run
from benchmarks.gpu.items import TESTS, Context, Item
from benchmarks.harness import Row
from tests.conftest import ROOT, Command

# what the corpus needs and a GPU machine may lack
ABSENT = """
    aiohttp brotli datasketch ftfy gigatoken langdetect lxml matplotlib newspaper pycld2 scipy snakemake submitit
    tiktoken tldextract trafilatura turbohtml warcio yarl
"""
BLOCKER = f"import sys; sys.modules.update(dict.fromkeys({ABSENT.split()}))"


def rows_of(folder: Path, part: str) -> list[dict[str, Any]]:
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["part"] == part]


def test_a_part_fills_its_table(tmp_path: Path) -> None:
    report = Report(tmp_path)
    for item in plan(["machine"], [], toy=True):
        assert item.run is not None
        for row in item.run(Context(tmp_path, toy=True)):
            report.add(item, row)
    assert all(row["ms"] > 0 for row in rows_of(tmp_path, "machine"))
    assert (tmp_path / "report.md").read_text().count("| bfloat16 product") == 3


def one_row_and_an_error(_context: Context) -> Iterator[Row]:
    yield {"device": "cpu"}
    raise ValueError("the second row")


def test_an_item_that_fails_leaves_its_rows_and_says_why(tmp_path: Path) -> None:
    report = Report(tmp_path)
    measure(Item("planning", "failing", one_row_and_an_error), report, Context(tmp_path, toy=True), 60)
    assert len(report.rows["planning"]) == 1 and report.failed
    text = (tmp_path / "report.md").read_text()
    assert "planning: FAILED: failing: ValueError: the second row" in text
    assert "one_row_and_an_error" in text  # the traceback


def test_the_tests_that_it_runs_exist() -> None:
    assert [name for name in TESTS if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_a_rehearsal_fills_every_table_without_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)  # Python imports it at the start of every process
    folder = tmp_path / "out"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = command("benchmarks.gpu", "--out", folder, "--toy", timeout=590)
    assert result.returncode == 0, result.stdout + result.stderr
    assert {path.name for path in folder.iterdir()} == {"report.md", "tests.txt", "rows.jsonl"}
    report = (folder / "report.md").read_text()
    assert "FAILED" not in report and "tests: build: skipped: no GPU" in report
    assert all(rows_of(folder, part) for part in PARTS)
    steps = rows_of(folder, "step")
    assert len(steps) == len([item for item in plan(["step"], [], toy=True) if item.part == "step"])
    assert all(5 < row["loss"] < 6 for row in steps)
    assert all(row["measured GB"] > 0 and row["device"] == "cpu" for row in rows_of(folder, "planning"))


def test_nothing_begins_after_its_time_and_rows_are_chosen_by_their_names(tmp_path: Path) -> None:
    report, late = Report(tmp_path), Item("planning", "late", one_row_and_an_error)
    run([late], report, Context(tmp_path, True, gpu=True), minutes=0)
    assert "planning: late: left out: no time is left for it" in (tmp_path / "report.md").read_text()
    chosen = plan(["step"], ["1.5b", "compile=model"], toy=True)
    assert {item.part for item in chosen} == {"step"}
    names = [item.name for item in chosen]
    assert names and all("1.5b" in name or "compile=model" in name for name in names)


def test_the_first_rows_are_there_after_four_minutes_even_if_the_tests_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, ended = 0.0, dict[str, float]()
    takes = {"build": 10, "pytest -m gpu": 1e6, "step": 40, "kernels": 1e6}  # a step row: compiling, and 10 s of steps

    def pretend(item: Item, limit: float) -> None:
        nonlocal now
        now += min(takes.get(item.name, takes.get(item.part, 60)), limit)
        ended[item.name] = now

    def tests(name: str, limit: float, *_: object) -> Row:
        pretend(Item("tests", name, None), limit)
        return {"ended": "ok"}

    monkeypatch.setattr(command_line.time, "monotonic", lambda: now)
    monkeypatch.setattr(command_line, "run_tests", tests)
    monkeypatch.setattr(command_line, "measure", lambda item, report, context, limit: pretend(item, limit))
    run(plan([], [], toy=False), Report(tmp_path), Context(tmp_path, False, gpu=True), minutes=9)
    first = ["build", "pytest -m gpu", "345m 16", "345m 16 kernels=on", "124m 32"]
    assert list(ended)[:5] == first and ended["124m 32"] <= 240
