"""A run stops if none of its checkpoints is usable, and starts if it has none."""

from pathlib import Path

import pytest

from common.errors import CheckpointError
from tests.training.checkpoint.planted import spoil
from tests.training.helpers import TINY, Capsys, copy_run, make_run, train_tiny
from training import checkpoint
from training.model_folder import checkpoint_folders


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", ["byte flipped", "no manifest"])
def test_without_a_usable_checkpoint_nothing_is_trained_or_changed(
    tiny_run: Path, tmp_path: Path, damage: str, capsys: Capsys
) -> None:
    config, run = copy_run(tiny_run, tmp_path), tmp_path / "models/tiny"
    for folder in checkpoint_folders(run):
        spoil(folder, damage)
    before = contents(run)
    assert train_tiny(config, "parallel.tensor=1", "train.iterations=30") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(run) in error and "iter_0000020" in error and "iter_0000010" in error
    assert contents(run) == before
    with pytest.raises(CheckpointError, match=str(run)):  # so do merge_mp and evaluate
        checkpoint.resolve(run)


def test_a_run_starts_after_its_first_save_was_killed(tmp_path: Path) -> None:
    config, run = make_run(tmp_path, model=TINY), tmp_path / "models/tiny"
    for name in ("iter_0000002.tmp", "iter_0000002.0123456789ab.tmp", "iter_0000002"):
        (run / name).mkdir(parents=True)
        if name.endswith("tmp"):
            (run / name / "rank_0_0.safetensors").write_bytes(b"half")
    assert train_tiny(config) == 0
    assert [path.name for path in run.glob("iter_*") if any(path.iterdir())] == ["iter_0000004"]
    assert not list(run.glob("*.tmp"))
