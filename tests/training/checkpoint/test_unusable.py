"""A run stops if none of its checkpoints is usable, and starts if it has none."""

import shutil
from pathlib import Path

import pytest

from common.errors import CheckpointError
from tests.helpers import run_main
from tests.training.checkpoint.planted import flip_a_bit
from tests.training.helpers import make_run
from training import checkpoint
from training.model_folder import checkpoint_folders
from training.train import main

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    train = {"save_interval": 2, "keep_last": 1, "keep_every": 2}
    assert run_main(main, "--config", make_run(folder, model=TINY, train=train), "--model", "tiny") == 0
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, configured for more iterations."""
    make_run(tmp_path, model=TINY, train={"iterations": 6, "save_interval": 2, "keep_last": 1})
    shutil.copytree(trained / "models", tmp_path / "models")
    return tmp_path / "models/tiny"


def spoil(folder: Path, damage: str) -> None:
    if damage == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        flip_a_bit(next(folder.glob("*.safetensors")))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(run: Path) -> int:
    return run_main(main, "--config", run.parents[1] / "config.yaml", "--model", "tiny")


@pytest.mark.parametrize("damage", ["byte", "no manifest"])
def test_without_a_usable_checkpoint_nothing_is_trained_or_changed(
    run: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in checkpoint_folders(run):
        spoil(folder, damage)
    before = contents(run)
    assert start(run) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(run) in error and "iter_0000004" in error and "iter_0000002" in error
    assert contents(run) == before
    with pytest.raises(CheckpointError, match=str(run)):  # so do merge_mp and evaluate
        checkpoint.resolve(run)


def test_a_run_starts_after_its_first_save_was_killed(tmp_path: Path) -> None:
    config, run = make_run(tmp_path, model=TINY), tmp_path / "models/tiny"
    for name in ("iter_0000002.tmp", "iter_0000002.0123456789ab.tmp", "iter_0000002"):
        (run / name).mkdir(parents=True)
        if name.endswith("tmp"):
            (run / name / "rank_0_0.safetensors").write_bytes(b"half")
    assert run_main(main, "--config", config, "--model", "tiny") == 0
    assert [path.name for path in run.glob("iter_*") if any(path.iterdir())] == ["iter_0000004"]
    assert not list(run.glob("*.tmp"))
