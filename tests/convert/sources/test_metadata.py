"""Reading `.metadata` executes nothing."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from common.errors import CheckpointError
from convert.sources.dcp import read_metadata
from tests.convert.sources.torch_dist_files import FolderWriter
from tests.training.checkpoint.planted import Touch, metadata_of, write_metadata


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of torch.distributed.checkpoint."""
    writer = FolderWriter(tmp_path / "dcp")
    writer.add(0, "weight", (2,), (0,), torch.ones(2))
    writer.close()
    return tmp_path / "dcp"


def whole_file(metadata: Metadata, touch: Touch) -> Any:
    return touch


def in_planner_data(metadata: Metadata, touch: Touch) -> Metadata:
    metadata.planner_data = {"step": (touch,)}
    return metadata


def in_a_name(metadata: Metadata, touch: Touch) -> Metadata:
    metadata.state_dict_metadata[touch] = next(iter(metadata.state_dict_metadata.values()))  # type: ignore[index]
    return metadata


@pytest.mark.parametrize("plant", [whole_file, in_planner_data, in_a_name])
def test_a_pickle_planted_in_metadata_is_named_and_never_run(
    folder: Path, tmp_path: Path, plant: Callable[..., Any]
) -> None:
    mark = tmp_path / "mark"
    write_metadata(folder, plant(metadata_of(folder), Touch(mark)))
    with pytest.raises(CheckpointError, match=r"\.metadata: [^\n]*mkdir[^\n]*\Z"):
        read_metadata(folder)
    assert not mark.exists()
    metadata_of(folder)  # pickle.load runs it
    assert mark.exists()


def test_a_record_outside_the_folder_or_its_file_is_refused(folder: Path) -> None:
    for key, value in (
        ("relative_path", "../other.distcp"),
        ("relative_path", "/etc/passwd"),
        ("offset", -1),
        ("length", "9"),
    ):
        metadata = metadata_of(folder)
        record = next(iter(metadata.storage_data.values()))
        setattr(record, key, value)
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
