"""Before the first step, every node is checked, and a bad one is named."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.training.helpers import launch, make_run, write_config
from training.leaving import RESUME_ME
from training.parallel.node_report import Report, describe, find_error, find_warnings

GB = 10**9


def rank(number: int, **different: object) -> Report:
    """A report of eight ranks on each node."""
    sizes = {"memory_free": 70 * GB, "memory_total": 80 * GB, "disk_free": 100 * GB}
    speed = 5e8 if number % 8 == 0 else None
    report = Report(number, f"node{number // 8 + 1}", "H100", "550.54", 4, 8, write_speed=speed, **sizes)
    return replace(report, **{"reduced": {"dp": 0.03, "tp": 0.001}, **different})  # type: ignore[arg-type]


def test_the_table_has_one_row_per_node_with_the_worst_of_its_ranks() -> None:
    reports = [rank(number) for number in range(16)]
    reports[3] = rank(3, memory_free=10 * GB, skew=-0.7, reduced={"dp": 0.05, "tp": 0.001})
    head, first, second = describe(reports).splitlines()
    assert head.split()[:3] == ["node", "device", "driver"]
    assert first.split() == (
        "node1 8 x H100 550.54 4 of 8 10.0 of 80.0 GB -0.7 s 100.0 GB 500 MB/s dp 50.00, tp 1.00".split()
    )
    assert "70.0 of 80.0 GB  same" in second


@pytest.mark.parametrize(
    ("different", "says"),
    [
        ({"skew": 9.0}, "node2: its clock is +9.0 s off rank 0's on node1"),
        ({"reduced": {"dp": 0.3, "tp": 0.001}}, "node2: an all-reduce over dp takes 300.0 ms, 10 times the median"),
        ({"device": "A100"}, "node2: device A100, elsewhere H100"),
        ({"memory_free": 3 * GB}, "node2: 3.0 GB of memory free, elsewhere 70.0 GB"),
    ],
)
def test_what_is_odd_is_a_warning_that_names_the_node(different: dict[str, object], says: str) -> None:
    reports = [rank(number) for number in range(24)]
    assert find_warnings(reports) == []
    reports[11] = rank(11, **different)
    (found,) = find_warnings(reports)
    assert found.startswith(says)
    assert find_error(reports, Path("run"), GB) == ""


def test_more_threads_than_cores_are_a_warning() -> None:
    assert find_warnings([rank(0, threads=9)]) == ["node1: 9 threads per process on 8 cores"]


def test_a_disk_without_space_for_a_checkpoint_is_an_error_with_both_numbers() -> None:
    reports = [rank(number, disk_free=2 * GB) for number in range(16)]
    expected = "preflight: node1 (and 1 more nodes): run: 2.00 GB free, a checkpoint has 4.26 GB; "
    assert find_error(reports, Path("run"), 4_260_000_000).startswith(expected)
    assert find_error([rank(0, disk_free=None)], Path("run"), GB) == "", "the file system does not say"


@pytest.mark.parametrize(
    ("fault", "codes", "says"),
    [
        ("none", [0, 0], ""),
        ("skew", [0, 0], "warning: node2: its clock is +60.0 s off rank 0's on node1"),
        ("blind", [2, 2], "error: preflight: node2: {folder}: does not see the file that rank 0 wrote"),
        ("full", [2, 2], "error: preflight: node2: {folder}: 0.04 MB free, a checkpoint has 0.41 MB"),
        ("silent", [RESUME_ME, RESUME_ME], "error: rank 0: preflight: rank 1 on node2 has not answered for 1 s"),
    ],
)
def test_the_ranks_of_a_job_find_the_bad_node(tmp_path: Path, fault: str, codes: list[int], says: str) -> None:
    config = make_run(tmp_path, parallel={"data": 2})
    folder = tmp_path / "models/tiny"
    results = launch(2, "tests.training.preflight_worker", config, fault)
    assert [result.returncode for result in results] == codes, results
    assert results[0].stderr.startswith(says.format(folder=folder))
    assert results[0].stderr.count("\n") == bool(says)
    if fault != "silent":
        assert [line.split()[0] for line in results[0].stdout.splitlines()] == ["preflight", "node", "node1", "node2"]
        assert results[1].stderr == "" == results[1].stdout
        assert not list(folder.iterdir())


def test_it_costs_a_training_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from common.config import load_settings
    from training.parallel.preflight import preflight
    from training.parallel.process_group import World

    experiment = load_settings(make_run(tmp_path)).models["tiny"]
    start = time.monotonic()
    preflight(World(0, 1, torch.device("cpu")), None, experiment, tmp_path)
    assert time.monotonic() - start < 1
    assert capsys.readouterr().out.startswith("preflight\nnode")


def test_the_command_needs_no_data_and_starts_the_processes_of_the_layout(tmp_path: Path, command: Command) -> None:
    config = write_config(tmp_path, {}, {}, {})
    done = command("cluster.preflight", "--config", config, "--model", "tiny")
    assert (done.returncode, done.stderr) == (0, "") and "1 x CPU" in done.stdout
    both = command("cluster.preflight", "--config", config, "--model", "tiny", "parallel.data=2")
    assert (both.returncode, both.stderr) == (0, "") and "2 x CPU" in both.stdout and "dp " in both.stdout
