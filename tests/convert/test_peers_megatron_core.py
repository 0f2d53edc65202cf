"""megatron-core's own model on CPU: its torch_dist is read as it is, and what we write is what it loads.

Needs `pip install --no-deps megatron-core`.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from convert.files.stored import LoadedTensor
from convert.sources.names import parse
from convert.sources.options import Options
from convert.sources.source import QKV, Source, whole
from convert.sources.torch_dist import open_folder
from convert.targets.torch_dist import write
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.sources.checks import merged

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]


def run_megatron(folder: Path, tp: int, pp: int) -> Path:
    """All ranks of tests/convert/megatron_core_worker.py; it loads our `truth`. Returns `folder`."""
    tensors = {name: whole(LoadedTensor(tensor)) for name, tensor in truth().items()}
    (folder / "ours").mkdir()
    write(Source(folder, "memory", SMALL, QKV(3), tensors, (), iteration=5), folder / "ours", tp=tp, pp=pp)
    job = {
        "tp": tp,
        "pp": pp,
        "rows": 384 if tp == 1 else 512,
        "sizes": {key: getattr(SMALL, key) for key in ("n_layer", "n_head", "n_embd", "n_positions", "n_inner")},
        "ours": str(folder / "ours/iter_0000005"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-W", "ignore", ROOT / "tests/convert/megatron_core_worker.py"]
    options: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), str(tp * pp), folder], **options) for rank in range(tp * pp)]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * (tp * pp), "\n".join(said)
    return folder


def gathered(folder: Path, name: str, pp: int = 1) -> dict[str, Tensor]:
    """Every tensor of the model that megatron-core gathered itself, by our names."""
    stages = [torch.load(folder / f"{name}_{stage}.pt", weights_only=True) for stage in range(pp)]
    return by_our_names({key: tensor for stage in stages for key, tensor in stage.items()})


def by_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {found.ours(): tensor for key, tensor in tensors.items() if (found := parse(key))}


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_its_model_is_read_as_it_is_and_it_loads_what_we_write(tmp_path: Path, tp: int, pp: int) -> None:
    folder = run_megatron(tmp_path, tp, pp)
    expected = gathered(folder, "saved", pp)
    for form in ("stacked", "numbered"):
        source = open_folder(folder / form / "iter_0000007", Options())
        assert f"tensor {tp} x pipeline {pp}" in source.layout and ("stacked" in source.layout) == (form == "stacked")
        assert (source.model.n_head, source.iteration) == (8, 7)
        assert_equal(merged(source), expected)
        assert source.step == (1 if form == "stacked" else None)
        for kind in source.moments:
            assert_equal(merged(source, kind), gathered(folder, kind, pp))
        assert set(source.moments) == ({"exp_avg", "exp_avg_sq"} if form == "stacked" else set())
    loaded = gathered(folder, "loaded", pp)
    assert len(loaded["wte.weight"]) == (384 if tp == 1 else 512)
    assert_equal({**loaded, "wte.weight": loaded["wte.weight"][: SMALL.vocab_size]}, truth())
