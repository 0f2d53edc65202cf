"""benchmarks.gpu at toy size on a CPU: every table is filled, with no package that a bare GPU
machine may lack.
"""

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu import items as gpu_items
from benchmarks.gpu import smoke
from benchmarks.gpu.__main__ import PARTS, Report, measure, plan, run
from benchmarks.gpu.items import TESTS, Context, Item
from benchmarks.gpu.steps import items, job_of
from benchmarks.harness import Row
from common.config import load_settings
from common.errors import ToolkitError
from tests.conftest import ROOT, Command

# what the corpus needs and a GPU machine may lack
ABSENT = """
    aiohttp brotli datasketch ftfy gigatoken langdetect lxml matplotlib newspaper pycld2 scipy snakemake submitit
    tldextract trafilatura turbohtml warcio yarl
"""
BLOCKER = f"import sys; sys.modules.update(dict.fromkeys({ABSENT.split()}))"


def rows_of(folder: Path, part: str) -> list[dict[str, Any]]:
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["part"] == part]


def one_row_and_an_error(_context: Context) -> Iterator[Row]:
    print("the trainer's log")
    yield {"device": "cpu"}
    raise ValueError("the second row")


def a_hang(context: Context) -> Iterator[Row]:
    process = subprocess.Popen(["sleep", "600"])
    print("before the hang")
    yield {"waits for": process.pid}
    time.sleep(600)


def a_crash(context: Context) -> Iterator[Row]:
    yield {"blocking": os.environ.get("CUDA_LAUNCH_BLOCKING")}
    if not context.blocking:
        ctypes.string_at(0)


@pytest.mark.slow
def test_an_item_that_fails_hangs_or_crashes_leaves_its_rows_its_log_and_its_stacks(tmp_path: Path) -> None:
    report, context = Report(tmp_path / "out"), Context(tmp_path, toy=True)
    assert measure(Item("planning", "failing", one_row_and_an_error), report, context, 60)
    assert measure(Item("planning", "hanging", a_hang, limit=12), report, context, 12)
    assert measure(Item("planning", "crashing", a_crash), report, replace(context, gpu=True), 60)
    first, hung, crashed, again = report.rows["planning"]
    assert first == {"device": "cpu"} and report.failed
    text, errors = [(tmp_path / "out" / name).read_text() for name in ("report.md", "errors.txt")]
    assert "planning: FAILED: failing: ValueError: the second row; see errors.txt" in text
    assert "one_row_and_an_error\n" in errors and "the trainer's log" in (tmp_path / "out/items.log").read_text()
    assert (
        "planning: FAILED: hanging: ended after 12 s" in text
        and "in a_hang\n" in errors
        and "before the hang" in errors
    )
    status = Path(f"/proc/{hung['waits for']}/stat")
    assert not status.exists() or " Z " in status.read_text(), "what an item has started ends with it"
    assert "planning: FAILED: crashing: its process ended with exit code -11" in text and "in a_crash\n" in errors
    assert (crashed["blocking"], again["blocking"]) == (None, "1")  # once more
    assert "crashing, CUDA_LAUNCH_BLOCKING=1: no failure" in text
    assert not measure(Item("planning", "late", a_hang), report, context, 1), "out of time is no failure of an item"


def test_after_a_failure_of_a_vital_check_the_others_run_and_the_tables_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    failing = ""

    def pretend(item: Item, *_: object) -> bool:
        ran.append(item.name)
        return item.name == failing

    monkeypatch.setattr(command_line, "measure", pretend)
    for name, count in (("device", 1), ("build", 2), ("main job", 7)):
        ran.clear()
        failing = name
        assert command_line.main(["--out", str(tmp_path), "--toy"]) == 1
        assert len(ran) == count and "step: 1.5b 16: left out: the first checks failed" in capsys.readouterr().out
    ran.clear()
    failing = "compute-sanitizer"
    assert command_line.main(["--out", str(tmp_path), "--toy", "--seconds", "1"]) == 0
    assert ran[7] == plan([], [], toy=True)[0].name and len(ran) == 7 + len(plan([], [], toy=True))


def test_everything_that_a_gpu_gets_is_a_valid_configuration(tmp_path: Path) -> None:
    for item in items(toy=False):
        job, _ = job_of(item.name, Context(tmp_path / item.part / item.name, toy=False))
        assert job.settings.models["step"].model.n_layer >= 12
    config, _ = smoke.write_run(tmp_path / "run", Context(tmp_path, toy=False), {"iterations": 20})
    assert load_settings(config).models["gpt2"].model.parameters > 120e6


def test_the_sanitizer_runs_the_check_without_a_pool_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "$*; $PYTORCH_NO_CUDA_MEMORY_CACHING"\nexit $ENDS_WITH\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ENDS_WITH", "0")
    assert [*smoke.sanitizer(Context(tmp_path, toy=True))] == [{"compute-sanitizer": "no errors"}]
    monkeypatch.setenv("ENDS_WITH", "9")
    with pytest.raises(ToolkitError, match=r"training.kernels check: exit code 9: .*-m training.kernels check; 1$"):
        [*smoke.sanitizer(Context(tmp_path, toy=True))]


def test_a_failing_test_is_printed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for failed in (False, True):
        gpu_items.pytest_runtest_logreport(
            SimpleNamespace(failed=failed, nodeid=f"test_{failed}", when="call", longreprtext="the traceback")
        )
    assert capsys.readouterr().out == "\nFAILED test_True (call)\nthe traceback\n"


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
    assert {path.name for path in folder.iterdir()} == {"report.md", "rows.jsonl", "items.log", "errors.txt"}
    report = (folder / "report.md").read_text()
    assert "FAILED" not in report and "left out" not in report
    assert all(rows_of(folder, part) for part in PARTS)
    found = rows_of(folder, "smoke")
    assert "weights, moments and losses equal those of an undisturbed training" in [row.get("found") for row in found]
    assert {row["as one process"] for row in found if "layout" in row} == {"yes"}
    steps = rows_of(folder, "step")
    assert len(steps) == len([item for item in plan(["step"], [], toy=True) if item.part == "step"])
    assert all(5 < row["loss"] < 6 for row in steps)
    assert all(row["measured GB"] > 0 for row in rows_of(folder, "planning"))


def test_nothing_begins_after_its_time_and_rows_are_chosen_by_their_names(tmp_path: Path) -> None:
    report, late = Report(tmp_path), Item("planning", "late", one_row_and_an_error)
    run([late], report, Context(tmp_path, True, gpu=True), end=time.monotonic() + 10)
    assert "planning: late: left out: no time is left for it" in (tmp_path / "report.md").read_text()
    chosen = plan(["step"], ["1.5b", "compile=model"], toy=True)
    assert {item.part for item in chosen} == {"step"}
    names = [item.name for item in chosen]
    assert names and all("1.5b" in name or "compile=model" in name for name in names)
