"""Folders of DCP: every kind of record is read without PyTorch's reader; nothing is executed."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from common.errors import CheckpointError
from convert.pt import fields, load_pt
from convert.sources.dcp import Dcp, read_metadata
from tests.convert.sources.torch_dist_files import FolderWriter
from tests.training.checkpoint.planted import Touch, metadata_of, write_metadata


def test_strided_scalar_and_empty_records_and_every_type_are_read(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path)
    whole = torch.arange(24.0).view(4, 6)
    writer.add(0, "scalar", (), (), torch.tensor(5.0))
    writer.add(0, "empty", (0, 3), (0, 0), torch.empty(0, 3))
    types = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
    for dtype in types:
        writer.add(0, str(dtype), (2, 12), (0, 0), whole.view(2, 12).to(dtype))
    writer.close()
    torch.save(whole.t()[1:5], tmp_path / "__0_1.distcp")  # a view of the whole storage
    metadata = writer.metadata = metadata_of(tmp_path)
    writer.add(1, "turned", (4, 4), (0, 0), torch.empty(4, 4))
    record = next(record for index, record in metadata.storage_data.items() if index.fqn == "turned")
    record.relative_path, record.offset, record.length = "__0_1.distcp", 0, (tmp_path / "__0_1.distcp").stat().st_size
    writer.close()
    dcp = Dcp(tmp_path)
    assert dcp.sharded("scalar").read().item() == 5.0
    assert dcp.sharded("empty").read().shape == (0, 3)
    assert torch.equal(dcp.sharded("turned").read(), whole.t()[1:5])
    for layer, row in zip(dcp.sharded("turned").layers(), whole.t()[1:5], strict=True):
        assert torch.equal(layer.read(), row)
    for dtype in types:
        assert torch.equal(dcp.sharded(str(dtype)).read(), whole.view(2, 12).to(dtype))


@pytest.mark.parametrize("version", ["3.11.2", "3.12.1", "3.13.0", "3.14.8"])
def test_what_any_supported_python_wrote_is_read(tmp_path: Path, version: str) -> None:
    """Pythons pickle Enum members and paths by other names, in `.metadata` and in args."""
    shutil.unpack_archive(Path(__file__).parent / "stored/pythons.zip", tmp_path)
    dcp = Dcp(tmp_path / version)
    assert torch.equal(dcp.sharded("weight").read(), torch.arange(6.0).reshape(2, 3)) and dcp.objects == ["step"]
    content = load_pt(tmp_path / version / "args.pt")
    assert torch.equal(content["w"].read(), torch.ones(2))
    assert fields(content["args"]).keys() == {"model_type", "flag", "se", "path", "dtype"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of torch.distributed.checkpoint."""
    writer = FolderWriter(tmp_path / "dcp")
    writer.add(0, "weight", (2,), (0,), torch.ones(2))
    writer.add(0, "other", (2,), (0,), torch.zeros(2))
    writer.close()
    return tmp_path / "dcp"


def test_a_tensor_that_says_it_is_none_is_refused(folder: Path) -> None:
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content.replace(b"TensorStorageMetadata", b"TensorStorageMetadatb"))
    with pytest.raises(CheckpointError, match=r"\.metadata: [^\n]*TensorStorageMetadatb[^\n]*\Z"):
        read_metadata(folder)


def in_planner_data(metadata: Metadata, touch: Touch) -> Metadata:
    metadata.planner_data = {"step": (touch,)}
    return metadata


def in_a_name(metadata: Metadata, touch: Touch) -> Metadata:
    metadata.state_dict_metadata[touch] = next(iter(metadata.state_dict_metadata.values()))  # type: ignore[index]
    return metadata


@pytest.mark.parametrize("plant", [lambda metadata, touch: touch, in_planner_data, in_a_name])
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("relative_path", "../other.distcp"), ("relative_path", "/etc/passwd"), ("offset", -1), ("length", "9")),
        *(("transform_descriptors", ["zstd"]), ("length", 1 << 20)),  # into the next record, whose data it would read
    ],
)
def test_a_record_outside_the_folder_or_its_file_or_transformed_is_refused(folder: Path, key: str, value: Any) -> None:
    metadata = metadata_of(folder)
    setattr(next(iter(metadata.storage_data.values())), key, value)
    write_metadata(folder, metadata)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_metadata(folder)


@pytest.mark.parametrize("content", [b"", b"cut", pickle.dumps([1, 2]), pickle.dumps(Metadata({}, None, None))])
def test_a_file_that_is_no_metadata_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=r"\.metadata: [^\n]*\Z"):
            read_metadata(folder)


def test_a_pickle_cannot_change_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The opcode BUILD, applied to a class, sets its attributes: only this pickle has the class."""
    monkeypatch.setattr(StorageMeta, "planted", 0, raising=False)  # removed again after the test
    attack = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n(N(dVplanted\nI1\nstb."
    (tmp_path / ".metadata").write_bytes(attack)
    with pytest.raises(CheckpointError):
        read_metadata(tmp_path)
    assert StorageMeta.planted == 0
