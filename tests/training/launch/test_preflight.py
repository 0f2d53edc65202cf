"""Before the first step, every node is checked, and a bad one is named."""

import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import JobError
from common.settings import ModelSettings
from tests.training.helpers import ALONE, launch, make_run, settings_of
from training.launch import preflight
from training.launch.preflight import Report, describe, find_error, find_warnings
from training.launch.rank import read_launch

GB = 10**9


def rank(number: int, **different: object) -> Report:
    """A report of eight ranks on each node."""
    sizes = {"memory_free": 70 * GB, "memory_total": 80 * GB, "disk_free": 100 * GB}
    report = Report(number, f"node{number // 8 + 1}", "H100", 4, 8, **sizes)
    return replace(report, **different)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("different", "other", "says"),
    [
        ({"device": "A100"}, {}, "A100"),
        ({"memory_free": 34 * GB}, {"memory_free": 35 * GB}, "34.0 GB"),
        ({"threads": 9}, {"threads": 8}, "9 threads"),
    ],
    ids=["device", "memory", "threads"],
)
def test_what_is_odd_is_one_warning_that_names_the_node(
    different: dict[str, object], other: dict[str, object], says: str
) -> None:
    reports = [rank(number) for number in range(24)]
    reports[8] = rank(8, **other)  # not yet odd
    assert find_warnings(reports) == []
    reports[8] = rank(8, **different)
    (found,) = find_warnings(reports)
    assert found.startswith("node2: ") and says in found
    assert find_error(reports, Path("run"), GB) == ""
    table = [re.split("  +", line) for line in describe(reports).splitlines()]
    assert table[1] == ["node1", "8 x H100", "4 of 8", "70.0 of 80.0 GB", "100.0 GB"]


def test_a_checkpoint_has_the_weights_and_two_moments_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSettings(n_layer=2, n_head=2, n_embd=8, seq_len=4, vocab_size=16)
    for missing in (0, 1):
        report = rank(0, disk_free=12 * model.parameters - missing)
        monkeypatch.setattr(preflight, "_inspect", lambda *_, report=report: report)
        with pytest.raises(JobError, match="a checkpoint has") if missing else nullcontext():
            preflight.preflight(ALONE, None, tmp_path, model)


def preflight_with_a_fault(argv: list[str]) -> int:
    """One process of a job with a rank per node: the last has too many threads, or a full disk."""
    config, fault = argv
    launch = read_launch()
    os.environ["SLURMD_NODENAME"] = f"node{launch.rank + 1}"
    if launch.rank == launch.world_size - 1:
        changed = {"threads": 10**9} if fault == "odd" else {"disk_free": 0}
        preflight._inspect = lambda *seen, real=preflight._inspect: replace(real(*seen), **changed)  # type: ignore
    return preflight.run_preflight(settings_of(Path(config)), "tiny")


@pytest.mark.parametrize(
    ("fault", "codes", "begins", "says"),
    [
        ("odd", [0, 0], "warning: ", "node2: 1000000000 threads"),
        ("full", [2, 2], "error: ", "preflight: node2: {folder}: 0.000 GB free"),
    ],
)
def test_the_ranks_of_a_job_find_the_bad_node(
    tmp_path: Path, fault: str, codes: list[int], begins: str, says: str
) -> None:
    config = make_run(tmp_path, parallel={"data": 2})
    folder = tmp_path / "models/tiny"
    results = launch(2, preflight_with_a_fault, config, fault)
    assert [result.returncode for result in results] == codes, results
    error = results[0].stderr
    assert error.startswith(begins) and says.format(folder=folder) in error and error.count("\n") == 1
    assert [line.split()[0] for line in results[0].stdout.splitlines()][-4:] == ["preflight", "node", "node1", "node2"]
    assert results[1].stderr == "" == results[1].stdout
    assert not list(folder.iterdir())
