"""Saves while training goes on, copies that drifted apart, disks that are full, and which
checkpoints stay.
"""

import resource
import threading
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError, TrainingError
from common.files import read_json
from convert.sources.find import open_source
from tests.helpers import PATIENCE, run_main
from tests.training.checkpoint.planted import spoil
from tests.training.helpers import (
    Capsys,
    Session,
    checkpoint_writer,
    launch,
    make_run,
    make_session,
    on_rank,
    open_session,
    plan_of,
    save_checkpoint,
    step_batches,
    tensor_files,
)
from training import checkpoint
from training.checkpoint import Progress, writing
from training.launch.process_group import World
from training.model_folder import checkpoint_folder, checkpoint_folders
from training.parallel.dtensor import local_shard
from training.step import train_step
from training.train import main as train


def open_tiny(folder: Path, **train: object) -> Session:
    session = make_session(folder, train=train)
    (folder / "run").mkdir()
    return session


def names(folder: Path) -> list[str]:
    """Iterations that are there, newest first, and whatever else begins like one."""
    assert not list(folder.glob("*.tmp"))
    return [path.name.lstrip("iter_0") for path in checkpoint_folders(folder)]


def test_a_save_in_the_background_holds_the_step_it_was_asked_for_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_tiny(tmp_path, async_save=True)
    steps = step_batches(session, 0)
    train_step(session, 1, next(steps), 0.01)
    expected = save_checkpoint(tmp_path / "now", session.parameters, session.optimizer, Progress(1, 8), session.plan)
    trained = threading.Event()
    real = writing.write

    def write(*arguments: Any, **options: Any) -> Path:
        assert trained.wait(PATIENCE)
        return real(*arguments, **options)

    monkeypatch.setattr(writing, "write", write)
    with checkpoint_writer(session, tmp_path / "run") as saver:
        saver.save(Progress(1, 8))
        before = session.parameters["wpe.weight"].detach().clone()
        train_step(session, 2, next(steps), 0.01)
        assert not torch.equal(session.parameters["wpe.weight"], before)
        assert saver.busy and not checkpoint_folders(tmp_path / "run")
        trained.set()
        saver.save(Progress(2, 16))  # waits for the one before
        assert saver.newest == checkpoint_folder(tmp_path / "run", 1)
    steps.close()
    assert saver.newest == checkpoint_folder(tmp_path / "run", 2)
    first, second = reversed(checkpoint_folders(tmp_path / "run"))
    assert tensor_files(first) == tensor_files(expected)
    assert tensor_files(second) != tensor_files(expected)
    checkpoint.verify(checkpoint.read_manifest(second))


def test_what_goes_wrong_in_the_background_is_raised_by_the_next_save_and_at_the_end(tmp_path: Path) -> None:
    session = open_tiny(tmp_path, async_save=True)
    with pytest.raises(CheckpointError, match="iter_0000001"), checkpoint_writer(session, tmp_path / "gone") as saver:
        saver.save(Progress(1, 8))
    with checkpoint_writer(session, tmp_path / "gone") as saver:
        saver.save(Progress(1, 8))
        with pytest.raises(CheckpointError, match="iter_0000001"):
            saver.save(Progress(2, 16))


def test_a_run_that_saves_in_the_background_ends_when_its_last_checkpoint_is_there(tmp_path: Path) -> None:
    options = ("train.async_save=true", "train.save_interval=1", "train.keep_last=2")
    assert run_main(train, "--config", make_run(tmp_path), "--model", "tiny", *options) == 0
    folder = tmp_path / "models" / "tiny"
    assert read_json(folder / "done.json")["checkpoint"] == "iter_0000004"
    assert names(folder) == ["4", "3"]


def save_with_faults(world: World, config: Path) -> None:
    """Train and save two steps. On the last rank, a number of a LayerNorm differs before the first
    save, and no file may grow in the second, as on a full disk.
    """
    session, folder = open_session(plan_of(config), world), config.parent / "models/tiny"
    last_rank, steps = world.rank == world.size - 1, step_batches(session, 0)
    with closing(steps), checkpoint_writer(session, folder) as saver:
        for iteration in (1, 2):
            train_step(session, iteration, next(steps), 0.01)
            if last_rank and iteration == 1:
                with torch.no_grad():
                    local_shard(session.parameters["h.1.ln_2.bias"])[-1] += 0.5
            elif last_rank:
                saver.wait()
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            saver.save(Progress(iteration, 8 * iteration, {"iteration": iteration}))


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_copies_that_drifted_apart_are_named_and_a_full_disk_ends_all_ranks_in_one_line(
    tmp_path: Path, background: bool
) -> None:
    config = make_run(tmp_path, parallel={"data": 2, "zero_stage": 0}, train={"async_save": background})
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    results = launch(2, partial(on_rank, save_with_faults, (config,), tmp_path))
    assert [result.returncode for result in results] == [2, 2] and results[1].stderr == ""
    *warnings, error = results[0].stderr.splitlines()
    assert warnings and all("1 of 28" in line and "h.1.ln_2.bias" in line for line in warnings)
    manifest = read_json(folder / "iter_0000001" / "manifest.json")
    assert manifest["replicas"]["drifted"] == pytest.approx({"h.1.ln_2.bias": 0.5})
    assert len(manifest["replicas"]["compared"]) == 28
    (note,) = open_source(folder / "iter_0000001").notes  # merge_mp and verify print it
    assert "h.1.ln_2.bias by up to 0.5" in note
    assert (manifest["model"]["vocab_size"], manifest["padded_vocab_size"]) == (257, 384)
    assert f"{folder}/iter_0000002.tmp/rank_1_" in error and "iter_0000001" in error
    assert names(folder) == ["1"]
    assert (folder / "latest").read_text() == "iter_0000001\n"
    found = checkpoint.newest(folder)
    assert found is not None and found.progress == Progress(1, 8, {"iteration": 1})


@pytest.fixture
def saved(tmp_path: Path) -> Session:
    """A run of four checkpoints at 2, 4, 6, 8."""
    session = open_tiny(tmp_path, keep_last=2, keep_every=4)
    for iteration in (2, 4, 6, 8):
        progress = Progress(iteration, 8 * iteration)
        save_checkpoint(tmp_path / "run", session.parameters, session.optimizer, progress, session.plan)
    return session


def test_the_newest_stay_and_those_of_every_so_many_iterations(saved: Session, tmp_path: Path) -> None:
    with checkpoint_writer(saved, tmp_path / "run") as saver:
        saver.save(Progress(10, 80))
        assert names(tmp_path / "run") == ["10", "8", "4"]
        saver.save(Progress(12, 96))
        saver.save(Progress(14, 112))
    assert names(tmp_path / "run") == ["14", "12", "8", "4"]


@pytest.mark.parametrize("foreign", ["notes.txt", "merged/config.json", "model.distcp"])
def test_a_checkpoint_with_a_file_that_no_save_wrote_is_never_removed(
    saved: Session, tmp_path: Path, foreign: str, capsys: Capsys
) -> None:
    for folder in ("iter_0000002", "iter_0000001.tmp"):  # too old, and left by a killed save
        file = tmp_path / "run" / folder / foreign
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    with checkpoint_writer(saved, tmp_path / "run") as saver:
        saver.save(Progress(10, 80))
    left = [path.name for path in sorted((tmp_path / "run").glob("iter_*"))]
    assert left == ["iter_0000001.tmp", *(f"iter_{number:07}" for number in (2, 4, 8, 10))]
    assert (tmp_path / "run/iter_0000002/manifest.json").exists()
    assert capsys.readouterr().err.count(foreign.partition("/")[0]) == 2


@pytest.mark.parametrize("damage", ["byte flipped", "no manifest"])
def test_a_damaged_checkpoint_does_not_count_as_one_that_is_kept(saved: Session, tmp_path: Path, damage: str) -> None:
    spoil(tmp_path / "run" / "iter_0000008", damage)
    with checkpoint_writer(saved, tmp_path / "run") as saver:
        saver.save(Progress(10, 80))
    assert names(tmp_path / "run") == ["10", "8", "6", "4"]


@pytest.mark.parametrize("refused", [1, 2, 3])  # before, after, and when old ones would be removed
def test_nothing_is_removed_before_a_newer_checkpoint_is_complete(saved: Session, tmp_path: Path, refused: int) -> None:
    asked: list[int] = []

    def refuse() -> None:
        asked.append(1)
        if len(asked) >= refused:
            raise TrainingError("another job has the folder")

    ends = pytest.raises(TrainingError) if refused < 3 else nullcontext()
    with ends, checkpoint_writer(saved, tmp_path / "run", refuse) as saver:
        saver.save(Progress(10, 80))
    assert names(tmp_path / "run") == [*["10"] * (refused == 3), "8", "6", "4", "2"]


def test_what_a_kill_left_of_a_removal_goes_and_a_checkpoint_of_the_same_iteration_is_replaced(
    saved: Session, tmp_path: Path
) -> None:
    old = tmp_path / "run" / "iter_0000002"
    (old / "manifest.json.tmp").write_text("half")
    old.rename(old.with_name(old.name + ".tmp"))
    newest = tmp_path / "run" / "iter_0000008"
    before = checkpoint.read_manifest(newest)
    with torch.no_grad():
        saved.parameters["wpe.weight"] += 1
    with checkpoint_writer(saved, tmp_path / "run") as saver:
        saver.save(Progress(8, 64))
    assert names(tmp_path / "run") == ["8", "6", "4"]
    assert checkpoint.read_manifest(newest).files != before.files
    checkpoint.verify(checkpoint.read_manifest(newest))
