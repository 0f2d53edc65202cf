"""The choice of operations is made once, recorded, and used again; without a GPU there is none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import KernelError
from common.files import read_json
from tests.training.helpers import Patch, make_run, settings_of
from training import operations
from training.kernels import library
from training.launch.process_group import World
from training.operations import Choice, choose_kernels
from training.planning.run import make_plan

GPU = World(0, 1, torch.device("cuda", 0))
DAY = 86400.0


@pytest.fixture
def used(monkeypatch: Patch) -> list[str]:
    """A GPU of which only the name is known, where a table gives the times; attention's kernels as
    they are used.
    """
    names: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "GPU")
    monkeypatch.setattr(operations, "precision_type", lambda *_: torch.bfloat16)
    monkeypatch.setattr(library, "prepare", lambda report: "")
    monkeypatch.setattr(operations, "use_attention", names.append)
    monkeypatch.setattr(operations, "measure_attention", lambda *_: {"cudnn": 1.0, "flash": 1.5, "math": 9.0})
    monkeypatch.setattr(library, "select", selected.append)
    return names


selected: list[Sequence[str]] = []
"""The kernels that were selected, in every start."""


def choose(
    folder: Path,
    seconds: float | None = 0.0,
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    **train: Any,
) -> dict[str, Any]:
    """Start a run that takes `seconds`; returns what it records, and the kernels that it
    selects.
    """
    config = make_run(folder / "run", train=train, model={"dropout": 0.0, **(model or {})}, parallel=parallel or {})
    experiment = make_plan(settings_of(config), "tiny").experiment
    operations.choose_operations(experiment, GPU, folder, seconds)
    return {**read_json(folder / "operations.json"), "selected": selected[-1]}


def test_the_fastest_attention_is_recorded_and_used_again(tmp_path: Path, used: list[str], monkeypatch: Patch) -> None:
    recorded = choose(tmp_path)
    assert recorded["attention"] == "cudnn" and recorded["milliseconds"]["flash"] == 1.5
    monkeypatch.setattr(operations, "measure_attention", lambda *_: {"flash": 0.1})
    choose(tmp_path)
    assert set(used) == {"cudnn"}
    choose(tmp_path, micro_batch_size=4, global_batch_size=8)  # other shapes: measured again
    assert used[-1] == "flash"
    monkeypatch.setattr(operations, "measure_attention", lambda *_: {"math": 1.0})
    choose(tmp_path, model={"dropout": 0.1}, micro_batch_size=4, global_batch_size=8)
    assert used[-1] == "math"
    monkeypatch.setattr(operations, "measure_attention", lambda *given: dict.fromkeys(given[-1], 1.0))
    choose(tmp_path, micro_batch_size=4, global_batch_size=8, reset_attention_mask=True)  # flash has no mask
    assert used[-1] == "efficient"


def test_another_value_of_anything_that_decides_is_another_choice(
    tmp_path: Path, used: list[str], monkeypatch: Patch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(
        operations, "measure_attention", lambda *given: measured.append(given) or dict.fromkeys(given[-1], 1.0)
    )
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _mode: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def start(**changes: Any) -> int:
        """How many choices were made in all after two starts."""
        for _ in range(2):
            choose(tmp_path, **changes)
        return len(measured)

    assert start() == 1
    settings = {"attention": "flash", "kernels": "off", "compile": "blocks", "recompute": "full"}
    settings |= {"deterministic": True, "reset_attention_mask": True}
    changes: list[dict[str, Any]] = [{name: value} for name, value in settings.items()]
    # two ranks have as many heads each as one with half of the heads
    changes.append({"model": {"n_head": 8, "n_embd": 64}, "parallel": {"tensor": 2}})
    for change in changes:
        before = start()
        assert start(**change) == before + 1, change
    others = (
        (torch.cuda, "get_device_name", lambda _device: "another"),
        (torch, "__version__", "another"),
        (operations, "precision_type", lambda *_: torch.float16),
    )
    for where, name, value in others:
        before = start()
        monkeypatch.setattr(where, name, value)
        assert start() == before + 1, name


def test_a_deterministic_run_chooses_among_kernels_that_repeat() -> None:
    times = {"cudnn": 1.0, "efficient": 1.1, "flash": 1.5, "math": 9.0}
    assert operations.fastest(times) == "cudnn" and operations.fastest(times, deterministic=True) == "flash"


def test_only_long_runs_with_auto_measure_kernels_and_resumed_ones_keep_them(
    tmp_path: Path, used: list[str], monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(*_arguments: Any) -> Choice:
        measured.append(library.KERNELS[0])
        return Choice(measured[-1:], ["it saves 9 ms"])

    monkeypatch.setattr(operations, "measure_kernels", measure)
    for kernels, expected in {"on": list(library.KERNELS), "off": []}.items():
        assert choose(tmp_path / kernels, DAY, kernels=kernels)["selected"] == expected
    short = choose(tmp_path / "short", 3599.0)
    assert short["selected"] == [] and "less than an hour" in short["reasons"][0]
    assert not measured
    for seconds in (DAY, 60.0):  # a resumed run
        found = choose(tmp_path / "long", seconds)
        assert found["selected"] == found["kernels"] == measured == [library.KERNELS[0]]
    assert capsys.readouterr().out.count("kernels: it saves 9 ms") == 1
    assert choose(tmp_path / "unknown", None)["selected"] and len(measured) == 2  # a GPU that the planner does not know
    monkeypatch.setattr(library, "prepare", lambda report: "no nvcc")
    missing = choose(tmp_path / "missing", DAY)
    assert missing["kernels"] == missing["selected"] == [] and "no nvcc" in missing["reasons"][0]


class Clock:
    """A device on which every measurement takes a minute of a fake clock."""

    def __init__(self, saved: dict[str, float], wrong: Sequence[str] = ()) -> None:
        self.seconds, self.saved, self.wrong, self.asked = 0.0, saved, wrong, list[tuple[str, ...]]()

    def check(self, kernel: str) -> None:
        if kernel in self.wrong:
            raise KernelError("results differ")

    def measure(self, part: str, kernels: Sequence[str]) -> float:
        self.seconds += 60
        self.asked.append((part, *kernels))
        if "broken" in kernels:
            raise RuntimeError("out of memory\nand more")
        return 10.0 - sum(self.saved.get(kernel, 0.0) for kernel in kernels)

    def choose(self, *parts: str, end: float = 1e9) -> Choice:
        pairs = dict(part.split(":") for part in parts)
        return choose_kernels(pairs, self.check, self.measure, end, lambda: self.seconds)


def test_kernels_that_are_right_and_save_time_are_chosen() -> None:
    clock = Clock({"fast": 2.0, "slow": -1.0, "even": 0.01, "wrong": 5.0, "pass": 1.0}, wrong=["wrong"])
    found = clock.choose("wrong:block", "fast:block", "slow:block", "broken:block", "even:block", "pass:optimizer")
    assert found.kernels == ["fast", "pass"]
    assert found.reasons == [
        "wrong is not used: results differ",
        "fast is used: block 10.000 ms without it, 8.000 ms with",
        "slow is not used: block 8.000 ms without it, 9.000 ms with",
        "broken is not used: out of memory",
        "even is not used: block 8.000 ms without it, 7.990 ms with",
        "pass is used: optimizer 8.000 ms without it, 7.000 ms with",
    ]
    assert clock.asked[:3] == [("block",), ("block", "fast"), ("block", "fast", "slow")]  # the first part once
    assert clock.asked[-2] == ("optimizer", "fast")


def test_the_time_ends_the_measurements() -> None:
    for end, kernels in ((241.0, ["a", "b", "c"]), (240.0, ["a", "b"]), (121.0, ["a"]), (120.0, []), (0.0, [])):
        clock = Clock({"a": 1.0, "b": 1.0, "c": 1.0})
        found = clock.choose("a:block", "b:block", "c:block", end=end)
        assert found.kernels == kernels and clock.seconds <= end
        left = found.reasons[len(kernels) :]
        assert len(left) == 3 - len(kernels) and all("no time was left of the 180 s" in reason for reason in left)
