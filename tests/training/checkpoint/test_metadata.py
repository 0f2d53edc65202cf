"""Reading `.metadata` and the records of a checkpoint executes nothing, and gives what DCP's own reader gives."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from common.errors import CheckpointError
from tests.training.checkpoint.planted import Touch, metadata_of, plant_record, write_metadata
from tests.training.helpers import Session, make_session, save_checkpoint
from training import checkpoint
from training.checkpoint import Progress
from training.checkpoint.metadata import RAW, read_metadata


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return make_session(tmp_path, model={"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8})


@pytest.fixture
def folder(session: Session, tmp_path: Path) -> Path:
    """A checkpoint."""
    return save_checkpoint(tmp_path / "run", session.parameters, session.optimizer, Progress(2, 16), session.plan)


def load_weights(folder: Path, _session: Session) -> None:
    """What training.evaluate and training.generate do."""
    checkpoint.load_weights(checkpoint.resolve(folder))


def resume(folder: Path, session: Session) -> None:
    """What a run does that continues."""
    checkpoint.load(checkpoint.resolve(folder), session.parameters, session.optimizer)


def whole_file(metadata: Metadata, touch: Touch) -> Any:
    return touch


def in_planner_data(metadata: Metadata, touch: Touch) -> Metadata:
    metadata.planner_data = {"step": (touch,)}
    return metadata


def in_a_name(metadata: Metadata, touch: Touch) -> Metadata:
    metadata.state_dict_metadata[touch] = next(iter(metadata.state_dict_metadata.values()))  # type: ignore[index]
    return metadata


@pytest.mark.parametrize("plant", [whole_file, in_planner_data, in_a_name])
@pytest.mark.parametrize("use", [load_weights, resume])
def test_a_pickle_planted_in_metadata_is_named_and_never_run(
    folder: Path, session: Session, tmp_path: Path, plant: Callable[..., Any], use: Callable[..., None]
) -> None:
    mark = tmp_path / "mark"
    write_metadata(folder, plant(metadata_of(folder), Touch(mark)))
    with pytest.raises(CheckpointError, match=r"\.metadata: [^\n]*mkdir[^\n]*\Z"):
        use(folder, session)
    assert not mark.exists()
    metadata_of(folder)  # pickle.load runs it
    assert mark.exists()


@pytest.mark.parametrize("as_bytes", [False, True], ids=["as a tensor", "as an object"])
@pytest.mark.parametrize("use", [load_weights, resume])
def test_a_pickle_planted_in_a_record_is_never_run(
    folder: Path, session: Session, tmp_path: Path, use: Callable[..., None], as_bytes: bool
) -> None:
    mark = tmp_path / "mark"
    plant_record(folder, "model.ln_f.bias", mark, as_bytes=as_bytes)
    with pytest.raises(CheckpointError, match=folder.name) as error:
        use(folder, session)
    assert not mark.exists() and "\n" not in str(error.value)
    if as_bytes:
        assert "model.ln_f.bias" in str(error.value)


def test_a_record_outside_the_folder_or_its_file_is_refused(folder: Path) -> None:
    for key, value in (
        ("relative_path", "../other.distcp"),
        ("relative_path", "/etc/passwd"),
        ("offset", -1),
        ("length", "9"),
        (RAW, "one byte too long"),
    ):
        metadata = metadata_of(folder)
        record = next(iter(metadata.storage_data.values()))
        complete = (record.offset, record.length + 1, torch.float32)
        setattr(record, key, complete if key == RAW else value)
        (folder / "changed").mkdir(exist_ok=True)
        write_metadata(folder / "changed", metadata)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            read_metadata(folder / "changed")


@pytest.mark.parametrize("content", [b"", b"cut", pickle.dumps([1, 2]), pickle.dumps(Metadata({}, None, None))])
def test_a_file_that_is_no_metadata_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=r"\.metadata: [^\n]*\Z"):
            read_metadata(folder)


def test_a_pickle_cannot_change_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The opcode BUILD, applied to a class, sets attributes of it: here of one that only this pickle has."""
    monkeypatch.setattr(StorageMeta, "planted", 0, raising=False)  # removed again after the test
    attack = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n(N(dVplanted\nI1\nstb."
    (tmp_path / ".metadata").write_bytes(attack)
    with pytest.raises(CheckpointError):
        read_metadata(tmp_path)
    assert StorageMeta.planted == 0
