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

from common.settings import ModelSettings
from convert.files.stored import LoadedTensor
from convert.sources.options import Options
from convert.sources.source import QKV, Source, whole
from convert.sources.torch_dist import open_folder
from convert.targets.torch_dist import write
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.sources.checks import merged
from training.inference.load import model_from_weights

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


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_it_loads_what_we_write_and_we_read_what_it_saves(tmp_path: Path, tp: int, pp: int) -> None:
    folder = run_megatron(tmp_path, tp, pp)
    for form in ("stacked", "numbered"):
        source = open_folder(folder / form / "iter_0000007", Options(vocab_size=SMALL.vocab_size))
        assert f"tensor {tp} x pipeline {pp}" in source.layout and ("stacked" in source.layout) == (form == "stacked")
        assert (source.model, source.iteration) == (SMALL, 7)
        assert_equal(merged(source), truth())
        if form == "stacked":
            assert source.step == 1
            first, second = merged(source, "exp_avg"), merged(source, "exp_avg_sq")
            for name, gradient in truth().items():  # Adam's first step
                torch.testing.assert_close(first[name], 0.1 * gradient)
                torch.testing.assert_close(second[name], 0.001 * gradient**2)
    if tp == 1:
        expected = torch.load(folder / "logits.pt", weights_only=True)
        for activation in ("gelu_new", "gelu"):
            settings = ModelSettings(n_layer=4, n_head=8, n_embd=32, seq_len=24, vocab_size=300)
            with torch.no_grad():
                found = model_from_weights(settings, truth())(expected["tokens"])
            difference = (found - expected[activation][..., :300]).abs().max() / found.abs().max()
            assert (difference < 1e-5) == (activation == "gelu_new")
