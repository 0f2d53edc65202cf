"""Reading `.metadata` and the records of a checkpoint executes nothing, and gives what DCP's own reader gives."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

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
    metadata = metadata_of(folder)
    index, record = next(iter(metadata.storage_data.items()))
    setattr(record, RAW, (record.offset + 64, record.length - 64, torch.float32))  # where a large tensor's bytes are
    write_metadata(folder, metadata)
    read, expected = read_metadata(folder), FileSystemReader(folder).read_metadata()
    assert read.state_dict_metadata == expected.state_dict_metadata
    assert read.storage_data == expected.storage_data and read.version == expected.version
    assert getattr(read.storage_data[index], RAW) == getattr(record, RAW)


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
    folder: Path, trained: Path, tmp_path: Path, plant: Callable[..., Any], use: Callable[..., None]
) -> None:
    mark = tmp_path / "mark"
    write_metadata(folder, plant(metadata_of(folder), Touch(mark)))
    with pytest.raises(CheckpointError, match=r"\.metadata: [^\n]*mkdir[^\n]*\Z"):
        use(folder, trained)
    assert not mark.exists()
    metadata_of(folder)  # pickle.load runs it
    assert mark.exists()


@pytest.mark.parametrize("as_bytes", [False, True], ids=["as a tensor", "as an object"])
@pytest.mark.parametrize("use", [load_weights, resume])
def test_a_pickle_planted_in_a_record_is_never_run(
    folder: Path, trained: Path, tmp_path: Path, use: Callable[..., None], as_bytes: bool
) -> None:
    mark = tmp_path / "mark"
    plant_record(folder, "model.ln_f.bias", mark, as_bytes=as_bytes)
    with pytest.raises(CheckpointError, match=folder.name) as error:
        use(folder, trained)
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
