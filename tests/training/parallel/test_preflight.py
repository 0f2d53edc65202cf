"""Before the first step, every node is checked, and a bad one is named."""

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
    ("different", "other", "says"),
    [
        ({"skew": 5.01}, {"skew": -5.0}, "+5.0 s"),
        ({"reduced": {"dp": 0.1501, "tp": 0.001}}, {"reduced": {"dp": 0.1499, "tp": 0.02}}, "dp"),
        ({"device": "A100"}, {}, "A100"),
        ({"memory_free": 34 * GB}, {"memory_free": 35 * GB}, "34.0 GB"),
        ({"threads": 9}, {"threads": 8}, "9 threads"),
    ],
    ids=["clock", "all-reduce", "device", "memory", "threads"],
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


def test_a_disk_without_space_for_a_checkpoint_is_an_error_that_names_a_node_and_counts_the_others() -> None:
    reports = [rank(number, disk_free=2 * GB) for number in range(16)]
    found = find_error(reports, Path("run"), 2 * GB + 10**7)
    assert found.startswith("preflight: node1 (and 1 more nodes): run: ") and "2.00 GB" in found and "2.01 GB" in found
    assert find_error(reports, Path("run"), 2 * GB) == ""
    assert find_error([rank(0, disk_free=None)], Path("run"), GB) == "", "the file system does not say"


@pytest.mark.parametrize(
    ("fault", "codes", "begins", "says"),
    [
        ("skew", [0, 0], "warning: ", "+60.0 s"),
        ("blind", [2, 2], "error: ", "preflight: node2: {folder}: "),
        ("silent", [RESUME_ME, RESUME_ME], "error: ", "rank 1 on node2"),
        pytest.param("full", [2, 2], "error: ", "preflight: node2: {folder}: ", marks=pytest.mark.slow),
        pytest.param("none", [0, 0], "", "", marks=pytest.mark.slow),
    ],
)
def test_the_ranks_of_a_job_find_the_bad_node(
    tmp_path: Path, fault: str, codes: list[int], begins: str, says: str
) -> None:
    config = make_run(tmp_path, parallel={"data": 2})
    folder = tmp_path / "models/tiny"
    results = launch(2, "tests.training.preflight_worker", config, fault)
    assert [result.returncode for result in results] == codes, results
    error = results[0].stderr
    assert error.startswith(begins) and says.format(folder=folder) in error and error.count("\n") == bool(begins)
    if fault != "silent":
        assert [line.split()[0] for line in results[0].stdout.splitlines()] == ["preflight", "node", "node1", "node2"]
        assert results[1].stderr == "" == results[1].stdout
        assert not list(folder.iterdir())


def test_the_command_needs_no_data_and_starts_the_processes_of_the_layout(tmp_path: Path, command: Command) -> None:
    config = write_config(tmp_path, {}, {}, {})
    both = command("cluster.preflight", "--config", config, "--model", "tiny", "parallel.data=2")
    assert (both.returncode, both.stderr) == (0, "") and "2 x CPU" in both.stdout and "dp " in both.stdout
