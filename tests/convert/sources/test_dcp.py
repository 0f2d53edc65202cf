"""Folders of torch.distributed.checkpoint: every kind of record is found and read without DCP."""

import shutil
from pathlib import Path

import pytest
import torch

from convert.pt import fields, load_pt
from convert.sources.dcp import Dcp
from tests.convert.sources.torch_dist_files import FolderWriter
from tests.training.checkpoint.planted import metadata_of


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
    for layer, row in zip(dcp.layers("turned"), whole.t()[1:5], strict=True):
        assert torch.equal(layer.read(), row)
    for dtype in types:
        assert torch.equal(dcp.sharded(str(dtype)).read(), whole.view(2, 12).to(dtype))


@pytest.mark.parametrize("version", ["3.11.2", "3.12.1", "3.13.0", "3.14.8"])
def test_what_any_supported_python_wrote_is_read(tmp_path: Path, version: str) -> None:
    """Pythons pickle Enum members and paths by other names; both are in `.metadata` and in the args of a .pt file."""
    shutil.unpack_archive(Path(__file__).parent / "stored/pythons.zip", tmp_path)
    dcp = Dcp(tmp_path / version)
    assert torch.equal(dcp.sharded("weight").read(), torch.arange(6.0).reshape(2, 3)) and dcp.objects == ["step"]
    content = load_pt(tmp_path / version / "args.pt")
    assert torch.equal(content["w"].read(), torch.ones(2))
    assert fields(content["args"]).keys() == {"model_type", "flag", "se", "path", "dtype"}
