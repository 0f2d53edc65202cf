"""Saves while training goes on, copies that drifted apart, disks that are full, and which checkpoints stay."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError, TrainingError
from common.files import read_json
from tests.training.helpers import (
    Session,
    checkpoint_writer,
    launch,
    launch_ok,
    make_run,
    open_session,
    run_main,
    save_checkpoint,
    settings_of,
    step_batches,
)
from training import checkpoint
from training.checkpoint import Manifest, Progress
from training.model_folder import checkpoint_folder, checkpoint_folders
from training.parallel.process_group import World
from training.run_plan import make_plan
from training.step import train_step
from training.train import main as train

WORKER = "tests.training.save_worker"


def open_tiny(folder: Path, **train: object) -> Session:
    session = open_session(
        make_plan(settings_of(make_run(folder, train=train)), "tiny"), World(0, 1, torch.device("cpu"), "test")
    )
    (folder / "run").mkdir()
    return session


def tensor_files(path: Path) -> dict[str, Any]:
    """What the manifest says of all files but .metadata, which has a random number."""
    return {name: digest for name, digest in read_json(path / "manifest.json")["files"].items() if "distcp" in name}


def names(folder: Path) -> list[str]:
    """Iterations that are there, newest first, and whatever else begins like one."""
    assert not list(folder.glob("*.tmp"))
    return [path.name.lstrip("iter_0") for path in checkpoint_folders(folder)]


# ------------------------------------------------------------------------------------------------ in the background


def test_a_save_in_the_background_holds_the_step_it_was_asked_for_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_tiny(tmp_path, async_save=True)
    steps = step_batches(session, 0)
    train_step(session, 1, next(steps), 0.01)
    expected = save_checkpoint(
        tmp_path / "same step", session.parameters, session.optimizer, Progress(1, 8), session.plan
    )
    trained = threading.Event()
    real = checkpoint.write

    def write(*arguments: Any, **options: Any) -> Path:
        assert trained.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(checkpoint, "write", write)
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
    with pytest.raises(CheckpointError, match=r"iter_0000001: not saved: .*last complete checkpoint is none"):
        with checkpoint_writer(session, tmp_path / "gone") as saver:
            saver.save(Progress(1, 8))
    with checkpoint_writer(session, tmp_path / "gone") as saver:
        saver.save(Progress(1, 8))
        with pytest.raises(CheckpointError, match="iter_0000001: not saved: No such file or directory"):
            saver.save(Progress(2, 16))


@pytest.mark.slow
def test_two_ranks_save_the_same_in_the_background_as_between_steps(tmp_path: Path) -> None:
    files = []
    for name, background in (("between", False), ("background", True)):
        parallel = {"data": 2, "zero_stage": 1}
        config = make_run(tmp_path / name, parallel=parallel, train={"async_save": background})
        results = launch_ok(2, WORKER, config)
        assert "asked 8 times" in results[0].stdout  # before a save, before its renaming
        folders = checkpoint_folders(tmp_path / name / "models" / "tiny")
        assert len(folders) == 4
        files.append([tensor_files(folder) for folder in folders])
    assert files[0] == files[1]


def test_a_run_that_saves_in_the_background_ends_when_its_last_checkpoint_is_there(tmp_path: Path) -> None:
    options = ("train.async_save=true", "train.save_interval=1", "train.keep_last=2")
    assert run_main(train, "--config", make_run(tmp_path), "--model", "tiny", *options) == 0
    folder = tmp_path / "models" / "tiny"
    assert read_json(folder / "done.json")["checkpoint"] == "iter_0000004"
    assert names(folder) == ["4", "3"]


# ------------------------------------------------------------------------------------------------ several ranks


def test_copies_that_drifted_apart_are_named_and_a_full_disk_ends_all_ranks_in_one_line(tmp_path: Path) -> None:
    config = make_run(tmp_path, parallel={"data": 2, "zero_stage": 0})
    results = launch(2, WORKER, config, "nudge", "full")
    folder = tmp_path / "models" / "tiny"
    warning, *again, error = results[0].stderr.splitlines()
    assert all(line.startswith("warning: iteration 2: 1 of 28 parameters differ") for line in again)
    assert (
        warning.startswith("warning: iteration 1: 1 of 28 parameters differ")
        and "h.1.ln_2.bias by up to 0.5" in warning
    )
    manifest = read_json(folder / "iter_0000001" / "manifest.json")
    assert manifest["replicas"]["drifted"] == pytest.approx({"h.1.ln_2.bias": 0.5})
    assert len(manifest["replicas"]["compared"]) == 28
    assert manifest["topology"] == {
        "world_size": 2,
        "axes": ["pp", "dp", "tp"],
        "sizes": [1, 2, 1],
        "coordinates": [[0, 0, 0], [0, 1, 0]],
    }
    assert (manifest["vocab_size"], manifest["padded_vocab_size"]) == (257, 384)

    assert [result.returncode for result in results] == [2, 2]
    assert results[1].stderr == ""
    assert f"{folder / 'iter_0000002'}: not saved: File too large ({folder}/iter_0000002.tmp/__1_" in error
    assert "the last complete checkpoint is iter_0000001" in error
    assert names(folder) == ["1"]
    assert (folder / "latest").read_text() == "iter_0000001\n"
    found = checkpoint.newest(folder)
    assert found is not None and found.progress == Progress(1, 8, {"iteration": 1})


@pytest.mark.slow
def test_a_full_disk_ends_all_ranks_in_one_line_in_the_background_too(tmp_path: Path) -> None:
    config = make_run(tmp_path, parallel={"pipeline": 2}, train={"async_save": True})
    results = launch(2, WORKER, config, "full")
    assert [result.returncode for result in results] == [2, 2]
    assert results[0].stderr.count("\n") == 1 and results[1].stderr == ""
    assert "iter_0000002: not saved: File too large" in results[0].stderr
    assert names(tmp_path / "models" / "tiny") == ["1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "compared"),
    [
        ({"tensor": 2}, {"wpe.weight", "ln_f.bias", "h.0.ln_1.weight", "h.0.attn.c_proj.bias", "h.1.mlp.c_proj.bias"}),
        ({"pipeline": 2}, {"wte.weight"}),
        ({"data": 2, "zero_stage": 3}, set()),
    ],
    ids=["tensor", "pipeline", "zero 3"],
)
def test_all_that_several_ranks_hold_is_compared_and_nothing_else(
    tmp_path: Path, parallel: dict[str, Any], compared: set[str]
) -> None:
    launch_ok(2, WORKER, make_run(tmp_path, parallel=parallel, train={"iterations": 1}))
    replicas = read_json(tmp_path / "models" / "tiny" / "iter_0000001" / "manifest.json")["replicas"]
    assert replicas["drifted"] == {}
    assert compared <= set(replicas["compared"])
    assert not any("c_attn" in name or "c_fc" in name or "c_proj.weight" in name for name in replicas["compared"])
    assert len(replicas["compared"]) == {"wte.weight": 1}.get("".join(compared), 2 * 6 + 3 if compared else 0)


# ------------------------------------------------------------------------------------------------ which ones stay


@pytest.fixture
def saved(tmp_path: Path) -> Session:
    """A run of four checkpoints at 2, 4, 6, 8."""
    session = open_tiny(tmp_path, keep_last=2, keep_every=4)
    for iteration in (2, 4, 6, 8):
        save_checkpoint(
            tmp_path / "run", session.parameters, session.optimizer, Progress(iteration, 8 * iteration), session.plan
        )
    return session


def test_the_newest_stay_and_those_of_every_so_many_iterations(saved: Session, tmp_path: Path) -> None:
    with checkpoint_writer(saved, tmp_path / "run") as saver:
        saver.save(Progress(10, 80))
        assert names(tmp_path / "run") == ["10", "8", "4"]
        saver.save(Progress(12, 96))
        saver.save(Progress(14, 112))
    assert names(tmp_path / "run") == ["14", "12", "8", "4"]


@pytest.mark.parametrize("damage", ["flip", "cut", "no manifest"])
def test_a_damaged_checkpoint_does_not_count_as_one_that_is_kept(saved: Session, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "run" / "iter_0000008"
    file = next(folder.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    if damage == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-1])
    with checkpoint_writer(saved, tmp_path / "run") as saver:
        saver.save(Progress(10, 80))
    assert names(tmp_path / "run") == ["10", "8", "6", "4"]


def test_nothing_is_removed_before_a_newer_checkpoint_is_complete(
    saved: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise TrainingError("another job has the folder")

    asked: list[int] = []
    with pytest.raises(TrainingError), checkpoint_writer(saved, tmp_path / "run", refuse) as saver:
        saver.save(Progress(10, 80))
    assert names(tmp_path / "run") == ["8", "6", "4", "2"]

    def refuse_later() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise TrainingError("another job has the folder")

    with pytest.raises(TrainingError), checkpoint_writer(saved, tmp_path / "run", refuse_later) as saver:
        saver.save(Progress(10, 80))
    assert names(tmp_path / "run") == ["8", "6", "4", "2"]


def test_what_a_kill_left_of_a_removal_is_no_checkpoint_and_goes_with_the_next_save(
    saved: Session, tmp_path: Path
) -> None:
    old = tmp_path / "run" / "iter_0000002"
    old.rename(old.with_name(old.name + ".tmp"))
    with checkpoint_writer(saved, tmp_path / "run") as saver:
        saver.save(Progress(10, 80))
    assert names(tmp_path / "run") == ["10", "8", "4"]


def test_a_checkpoint_of_the_same_iteration_is_replaced(saved: Session, tmp_path: Path) -> None:
    def manifest() -> Manifest:
        return checkpoint.read_manifest(tmp_path / "run" / "iter_0000008")

    before = manifest()
    with torch.no_grad():
        saved.parameters["wpe.weight"] += 1
    with checkpoint_writer(saved, tmp_path / "run") as saver:
        saver.save(Progress(8, 64))
    assert manifest().files != before.files
    checkpoint.verify(manifest())
