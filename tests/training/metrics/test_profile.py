"""Profiles of chosen iterations on chosen ranks, which change nothing else."""

import json
from pathlib import Path

import pytest
import torch

from common.settings import TrainSettings
from tests.training.helpers import Capsys, Patch, course, make_run, train_tiny
from training.launch.process_group import World
from training.metrics.profile import Profile


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in (folder / "profile").rglob("*") if path.is_file())


def test_the_chosen_iterations_are_in_the_trace_and_the_training_is_what_it_is_without(tmp_path: Path) -> None:
    for run, more in ("plain", ()), ("profiled", ("train.profile=[2, 3]",)):
        assert train_tiny(make_run(tmp_path / run), *more) == 0
    assert course(tmp_path / "plain") == course(tmp_path / "profiled")
    folder = tmp_path / "profiled/models/tiny/profile/iter_0000002-0000003"
    assert names(folder.parent.parent) == [f"profile/{folder.name}/rank_00000.{kind}" for kind in ("json", "txt")]
    events = json.loads((folder / "rank_00000.json").read_text())["traceEvents"]
    optimizer_steps = [event for event in events if str(event.get("name")).startswith("Optimizer.step")]
    assert len(optimizer_steps) == 2 and any(event.get("name") == "[memory]" for event in events)
    by_time, by_memory = (folder / "rank_00000.txt").read_text().split("Self CPU time total")[:2]
    assert "aten::addmm" in by_time and "CPU Mem" in by_memory


def recorded(folder: Path, rank: int, iterations: range, window: tuple[int, int]) -> list[str]:
    """The files of one start."""
    train = TrainSettings(iterations=100, profile=window, profile_ranks=[0, 2])
    with Profile(folder, train, World(rank, 4, torch.device("cpu"))) as profile:
        for iteration in iterations:
            profile.begin(iteration)
            torch.ones(2).add(1)
    return [name for name in names(folder) if name.endswith(f"{rank:05d}.json")]


def test_a_start_records_its_own_part_of_the_iterations_on_the_chosen_ranks_alone(tmp_path: Path) -> None:
    assert recorded(tmp_path, 0, range(1, 4), (3, 5)) == ["profile/iter_0000003-0000003/rank_00000.json"]  # stopped
    assert recorded(tmp_path, 2, range(4, 9), (3, 5)) == ["profile/iter_0000004-0000005/rank_00002.json"]  # resumed
    assert recorded(tmp_path, 1, range(1, 9), (3, 5)) == recorded(tmp_path, 3, range(6, 9), (3, 5)) == []


def test_a_profile_that_cannot_be_written_ends_no_training(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.metrics.profile.cache_path", fails)
    assert recorded(tmp_path, 0, range(1, 9), (3, 5)) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert "profile/iter_0000003-0000005/rank_00000: no profile: " in line and "No space left" in line


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_on_a_gpu_there_is_a_snapshot_of_its_allocations(tmp_path: Path, monkeypatch: Patch) -> None:
    """Of a GPU that is not there: only the files and the calls are looked at."""
    kept = list[object]()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled="all", **_: kept.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    train = TrainSettings(iterations=100, profile=(3, 4))
    with Profile(tmp_path, train, World(0, 1, torch.device("cuda", 0))) as profile:
        for iteration in range(1, 7):
            profile.begin(iteration)
            torch.ones(2).add(1)
    assert kept == ["all", None]
    assert [Path(name).suffix for name in names(tmp_path)] == [".json", ".pickle", ".txt"]


def test_iterations_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[5, 3\] ends before it begins"):
        TrainSettings(iterations=9, profile=(5, 3))
