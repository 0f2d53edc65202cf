"""benchmarks.gpu at toy size on a CPU: every table is filled, with no package that a bare GPU machine may lack."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import plan, run
from benchmarks.gpu.goals import goals
from benchmarks.gpu.items import Context, Item, Row
from benchmarks.gpu.output import Report, cell
from benchmarks.gpu.parts import FILES, PARTS
from benchmarks.gpu.planning import CASES
from benchmarks.gpu.profile import best
from benchmarks.gpu.steps import VARIANTS, Variant
from benchmarks.gpu.worker import Message, Worker
from tests.conftest import ROOT

# what such a machine has, as modules: PyTorch, transformers, pytest, their needs, and a few more
PRESENT = """
    torch torchgen triton numpy sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions
    transformers tokenizers safetensors huggingface_hub regex tqdm packaging yaml requests urllib3 certifi idna
    charset_normalizer httpx httpx2 httpcore httpcore2 truststore anyio h11 sniffio hf_xet click typer shellingham
    pytest _pytest py pluggy iniconfig pytest_timeout xdist execnet hypothesis sortedcontainers attr
    psutil tabulate wcwidth rich pygments markdown_it mdurl xxhash tensorboard google grpc absl markdown werkzeug
""".split()
CARRIED = ["pydantic", "pydantic_core", "annotated_types", "typing_inspection", "orjson", "zstandard"]
OURS = ["benchmarks", "common", "corpus", "tests", "training"]

BLOCKER = f"""
import sys
from importlib.machinery import PathFinder

KNOWN = sys.stdlib_module_names | {{*{PRESENT + CARRIED + OURS}}}

class Known(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        hidden = path is None and top not in KNOWN and not top.startswith("_")
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Known
"""


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DIR of a run at toy size, in which only PRESENT and CARRIED can be imported."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "sitecustomize.py").write_text(BLOCKER)  # Python imports it at the start of every process
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", folder / "out", "--toy"],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT))),
            "CUDA_VISIBLE_DEVICES": "",
            "HYPOTHESIS_NO_PLUGINS": "1",  # those of packages that are hidden
        },
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "out"


def rows_of(folder: Path, part: str) -> list[dict[str, Any]]:
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["part"] == part]


@pytest.mark.timeout(420)
def test_a_rehearsal_fills_every_table_without_other_packages(rehearsal: Path) -> None:
    expected = {f"{file}.md" for file in FILES.values()} | {"tests.txt", "rows.jsonl"}
    assert {path.name for path in rehearsal.iterdir()} == expected and len(expected) <= 8
    for file in set(FILES.values()):
        text = (rehearsal / f"{file}.md").read_text()
        assert "CPUs, torch " in text.splitlines()[0] and "toy size" in text and "FAILED" not in text
        assert "|---" in text
    assert all(rows_of(rehearsal, part) for part in PARTS)


def test_a_rehearsal_has_every_step_and_its_figures(rehearsal: Path) -> None:
    rows = rows_of(rehearsal, "step")
    assert [row["item"] for row in rows] == list(VARIANTS)
    assert all(row["tokens/s"] > 0 and 5 < row["loss"] < 6 for row in rows)


def test_a_rehearsal_says_what_needs_a_gpu(rehearsal: Path) -> None:
    assert "- build: skipped: no GPU" in (rehearsal / "machine.md").read_text()
    (row,) = rows_of(rehearsal, "tests")
    assert row["ended"] == "ok" and "skipped" in row["last line"] and "-m gpu" in row["command"]


def test_kernels_the_loss_and_the_profile_have_their_rows(rehearsal: Path) -> None:
    kernels = rows_of(rehearsal, "kernels")
    assert {"cross_entropy", "adamw"} <= {row.get("kernel") for row in kernels}
    values = {row["loss"]: row["value"] for row in kernels if "loss" in row}
    assert values["chunked"] == pytest.approx(values["whole, eager"], rel=1e-3)
    profile = rows_of(rehearsal, "profile")
    assert len(profile) == 18 and profile[0]["share %"] == 100
    assert sum(row["ms per step"] for row in profile[1:17]) == pytest.approx(profile[0]["ms per step"])


def test_a_rehearsal_compares_predicted_and_measured_steps(rehearsal: Path) -> None:
    rows = rows_of(rehearsal, "planning")
    assert {(row["micro"], row["recompute"]) for row in rows} == {*product((8, 16), ("none", "selective", "full"))}
    shapes = {(case.size, case.micro, case.dropout, case.recompute) for case in CASES.values()}
    assert shapes >= {*product(("124m", "345m"), (8, 16), (0.0, 0.1), ("none", "selective", "full"))}
    assert all(row["measured GB"] > 0 and row["measured ms"] > 0 and row["device"] == "cpu" for row in rows)
    assert "goal" not in (rehearsal / "planning.md").read_text(), "judged on GPUs only"


def items(*names: str) -> list[Item]:
    return [Item("part", name, seconds=1) for name in names]


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(Worker(toy=True, parts="tests.benchmarks.failing_parts")) as made:
        yield made


def said(worker: Worker, name: str, limit: float = 60) -> list[Message]:
    (item,) = items(name)
    return list(worker.run(item, Context(Path(), toy=True, gpu=True), limit))


def test_an_item_that_fails_leaves_the_others_a_process_that_works(worker: Worker) -> None:
    (first,) = said(worker, "fine")
    for name, kind, text in (
        ("leaves out", "left out", "no such key"),
        ("takes too much", "left out", "out of memory (4 GB)"),
    ):
        row, message = said(worker, name)
        assert row.row == first.row and (message.kind, message.text) == (kind, text)
    row, message = said(worker, "raises")
    assert message.kind == "failed" and message.text.startswith("ValueError: a bad number\n")
    (second,) = said(worker, "fine")
    assert second.row != first.row  # a GPU's errors stay with a process
    row, message = said(worker, "dies")
    assert message == Message("failed", text="its process ended with exit code 3")
    worker.start()
    row, message = said(worker, "hangs", limit=1)
    assert message.kind == "failed" and message.text == "ended after 1 s without a row"


def test_nothing_begins_that_cannot_end_in_time(tmp_path: Path) -> None:
    report = Report(tmp_path, {"part": "Title"}, {"part": "part"})
    with closing(Worker(toy=True)) as worker:
        run([Item("part", "long", seconds=50)], report, worker, Context(tmp_path, True, gpu=True), minutes=0.5)
        assert worker.device is None
    assert "- long: left out: it needs 50 s, and 25 s are left for it" in (tmp_path / "part.md").read_text()


def test_steps_are_chosen_by_their_names_and_the_machine_is_always_measured() -> None:
    chosen = plan(["step"], ["1.5b", "compile model"], toy=True)
    assert {item.part for item in chosen} == {"machine", "step"}
    names = [item.name for item in chosen if item.part == "step"]
    assert names and all("1.5b" in name or "compile model" in name for name in names)


def step(micro: int, mfu: float, variant: str = "", **others: Any) -> Row:
    row = {"size": "345m", "step": "ours", "dropout": 0.0, "variant": variant, "micro": micro, "MFU %": mfu}
    return {**row, "tokens/s": mfu * 4000, **others}


def test_goals_are_judged_by_the_best_row() -> None:
    rows = [step(16, 48.0), step(32, 51.5), step(16, 50.0, "kernels off"), step(64, 60.0, dropout=0.1)]
    (mfu, auto) = goals({"step": rows})
    assert "51.5 % at micro-batch 32, reached" in mfu
    assert "0.960 of its tokens per second, NOT reached" in auto
    losses = [
        {"loss": "whole, compiled", "ms": 10.0, "peak GB": 8.0},
        {"loss": "chunked", "ms": 11.0, "peak GB": 2.5},
    ]
    assert "1.10 times the time, 0.31 of the memory, NOT reached" in goals({"kernels": losses})[0]
    copies = [{"kernel": "adamw", "of a copy %": 91.0}, {"kernel": "bias_gelu", "of a copy %": None}]
    assert "adamw with 91 %, reached" in goals({"kernels": copies})[0]


def test_predictions_are_judged_by_the_worst_row_on_a_gpu() -> None:
    row = {
        "device": "cuda",
        "size": "345m",
        "micro": 16,
        "recompute": "none",
        "memory error %": 4.0,
        "time error %": 3.0,
    }
    worse = {**row, "micro": 8, "memory error %": -9.0, "time error %": -16.0}
    memory, time = goals({"planning": [row, worse, {**row, "device": "cpu", "memory error %": 80.0}]})
    assert memory.endswith("the worst of 2 is -9.0 % at 345m, micro-batch 8, recompute none, reached")
    assert "-16.0 %" in time and time.endswith("NOT reached")
    assert goals({"planning": [{**row, "device": "cpu"}]}) == []


def test_the_profile_is_of_the_fastest_step() -> None:
    fastest = step(16, 52.0, "compile model")
    assert best([step(16, 48.0), fastest, step(16, 60.0, dropout=0.1)]) == Variant(
        "345m", 16, train={"compile": "model"}
    )
    assert best([]) == Variant("345m", 16)


def test_cells_are_short() -> None:
    assert [cell(value) for value in (None, 204123.4, 12.3456, 1024, "text")] == [
        "-",
        "204,123",
        "12.35",
        "1,024",
        "text",
    ]
