"""Reading `.metadata` and the records of a checkpoint executes nothing, and gives what DCP's own reader gives."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from common.errors import CheckpointError
from tests.training.checkpoint.planted import Touch, metadata_of, plant_record, write_metadata
from tests.training.helpers import make_run, open_session, run_main, settings_of
from training import checkpoint
from training.checkpoint.metadata import RAW, read_metadata
from training.run_plan import make_plan
from training.train import main

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint at 2."""
    folder = tmp_path_factory.mktemp("trained")
    config = make_run(folder, model=TINY, train={"iterations": 2, "save_interval": 2})
    assert run_main(main, "--config", config, "--model", "tiny") == 0
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of its checkpoint."""
    return Path(shutil.copytree(trained / "models/tiny/iter_0000002", tmp_path / "iter_0000002"))


def load_weights(folder: Path, _trained: Path) -> None:
    """What training.evaluate and training.generate do."""
    checkpoint.load_weights(checkpoint.resolve(folder))


def resume(folder: Path, trained: Path) -> None:
    """What a run does that continues."""
    session = open_session(make_plan(settings_of(trained / "config.yaml"), "tiny"))
    checkpoint.load(checkpoint.resolve(folder), session.parameters, session.optimizer)


def test_it_reads_our_own_checkpoints_as_dcp_does(folder: Path) -> None:
    read, expected = read_metadata(folder), FileSystemReader(folder).read_metadata()
    assert read.state_dict_metadata == expected.state_dict_metadata
    assert read.storage_data == expected.storage_data and read.version == expected.version
    for index, record in expected.storage_data.items():
        assert getattr(read.storage_data[index], RAW, None) == getattr(record, RAW, None)


def test_it_keeps_where_the_bytes_of_a_large_tensor_are(folder: Path) -> None:
    metadata = metadata_of(folder)
    index, record = next(iter(metadata.storage_data.items()))
    setattr(record, RAW, (record.offset + 64, record.length - 64, torch.float32))
    write_metadata(folder, metadata)
    assert getattr(read_metadata(folder).storage_data[index], RAW) == getattr(record, RAW)


def test_it_reads_what_dcps_own_writer_leaves(tmp_path: Path) -> None:
    content = {
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "nested": {"list": [torch.zeros(0), torch.ones(1, dtype=torch.int64)], "number": 3},
        "channels": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp_save(content, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    read, expected = read_metadata(tmp_path), FileSystemReader(tmp_path).read_metadata()
    assert read.state_dict_metadata == expected.state_dict_metadata and read.storage_data == expected.storage_data


def whole_file(metadata: Metadata, touch: Touch) -> Any:
    return touch


def in_planner_data(metadata: Metadata, touch: Touch) -> Metadata:
    metadata.planner_data = {"step": (touch,)}
    return metadata


def in_storage_meta(metadata: Metadata, touch: Touch) -> Metadata:
    metadata.storage_meta = StorageMeta(modules=[touch])  # type: ignore[list-item]
    return metadata


def in_a_name(metadata: Metadata, touch: Touch) -> Metadata:
    metadata.state_dict_metadata[touch] = next(iter(metadata.state_dict_metadata.values()))  # type: ignore[index]
    return metadata


@pytest.mark.parametrize("plant", [whole_file, in_planner_data, in_storage_meta, in_a_name])
@pytest.mark.parametrize("use", [load_weights, resume])
def test_a_pickle_planted_in_metadata_is_named_and_never_run(
    folder: Path, trained: Path, tmp_path: Path, plant: Callable[..., Any], use: Callable[..., None]
) -> None:
    mark = tmp_path / "mark"
    write_metadata(folder, plant(metadata_of(folder), Touch(mark)))
    with pytest.raises(CheckpointError) as error:
        use(folder, trained)
    assert not mark.exists()
    message = str(error.value)
    assert message.startswith(f"{folder / '.metadata'}: names ") and "mkdir" in message and "\n" not in message
    metadata_of(folder)  # pickle.load runs it
    assert mark.exists()


@pytest.mark.parametrize("use", [load_weights, resume])
def test_a_pickle_planted_in_a_record_is_never_run(
    folder: Path, trained: Path, tmp_path: Path, use: Callable[..., None]
) -> None:
    mark = tmp_path / "mark"
    plant_record(folder, "model.ln_f.bias", mark)
    with pytest.raises(CheckpointError) as error:
        use(folder, trained)
    assert not mark.exists()
    assert str(error.value).startswith(f"{folder}: cannot be read (") and "\n" not in str(error.value)


@pytest.mark.parametrize("use", [load_weights, resume])
def test_an_object_in_place_of_a_tensor_is_refused_before_it_is_loaded(
    folder: Path, trained: Path, tmp_path: Path, use: Callable[..., None]
) -> None:
    mark = tmp_path / "mark"
    plant_record(folder, "model.ln_f.bias", mark, as_bytes=True)
    with pytest.raises(CheckpointError, match=r"\.metadata: 'model.ln_f.bias' is no tensor"):
        use(folder, trained)
    assert not mark.exists()
    tensors: dict[str, Tensor] = {"model.ln_f.bias": torch.zeros(8)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp_load(tensors, checkpoint_id=folder, no_dist=True)  # DCP's planner runs it
    assert mark.exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda record: setattr(record, "relative_path", "../other.distcp"), "'../other.distcp' is no file name"),
        (lambda record: setattr(record, "relative_path", "/etc/passwd"), "'/etc/passwd' is no file name"),
        (lambda record: setattr(record, "offset", -1), "below 0"),
        (lambda record: setattr(record, "length", "9"), "a number below 0 or none"),
        (lambda record: setattr(record, RAW, (record.offset, record.length + 1, torch.float32)), "outside its record"),
    ],
)
def test_a_record_outside_the_folder_or_its_file_is_refused(
    folder: Path, change: Callable[[_StorageInfo], None], problem: str
) -> None:
    metadata = metadata_of(folder)
    change(next(iter(metadata.storage_data.values())))
    write_metadata(folder, metadata)
    with pytest.raises(CheckpointError, match=problem):
        read_metadata(folder)


def test_transformed_records_of_ours_are_refused(folder: Path) -> None:
    metadata = metadata_of(folder)
    metadata.storage_data[MetadataIndex("step", torch.Size([]))].transform_descriptors = ["stream.zstd"]
    write_metadata(folder, metadata)
    with pytest.raises(CheckpointError, match="'step' is transformed"):
        checkpoint.load_weights(checkpoint.resolve(folder))


@pytest.mark.parametrize("content", [b"", b"cut", pickle.dumps([1, 2]), pickle.dumps(Metadata({}, None, None))])
def test_a_file_that_is_no_metadata_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        read_metadata(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / '.metadata'}: damaged") and "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_metadata(tmp_path / "none")


def test_a_pickle_cannot_change_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The opcode BUILD, applied to a class, sets attributes of it: here of one that only this pickle has."""
    monkeypatch.setattr(StorageMeta, "planted", 0, raising=False)  # removed again after the test
    attack = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n(N(dVplanted\nI1\nstb."
    (tmp_path / ".metadata").write_bytes(attack)
    with pytest.raises(CheckpointError, match="damaged"):
        read_metadata(tmp_path)
    assert StorageMeta.planted == 0  # type: ignore[attr-defined]
    pickle.loads(attack)
    assert StorageMeta.planted == 1  # type: ignore[attr-defined]
