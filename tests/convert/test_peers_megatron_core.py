"""megatron-core's own model on CPU: its torch_dist is read as it is, and what we write is what it loads.

Needs `pip install --no-deps megatron-core`.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.settings import ModelSettings
from convert.arguments import Options
from convert.sources.torch_dist import open_folder
from convert.targets.torch_dist import write
from tests.convert import megatron_core_job
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.helpers import merged, source_of
from tests.numerics import assert_close, logit_terms
from training.inference.load import model_from_weights

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


@pytest.mark.slow
def test_it_loads_what_we_write_and_we_read_what_it_saves(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    write(source_of(truth(), iteration=7), tmp_path, tp=2, pp=2)
    job = [sys.executable, megatron_core_job.__file__, tmp_path / "iter_0000007", "2", "2", tmp_path / "saved"]
    result = subprocess.run(list(map(str, job)), capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    source = open_folder(tmp_path / "saved", Options(vocab_size=SMALL.vocab_size))
    assert "stacked" in source.layout and "tensor 2 x pipeline 2" in source.layout
    assert (source.model, source.iteration, source.step) == (SMALL, 7, 1)
    assert_equal(merged(source), truth())
    first, second = merged(source, "exp_avg"), merged(source, "exp_avg_sq")
    for name, gradient in truth().items():  # Adam's first step
        torch.testing.assert_close(first[name], 0.1 * gradient)
        torch.testing.assert_close(second[name], 0.001 * gradient**2)
    sizes = ModelSettings(n_layer=4, n_head=8, n_embd=32, seq_len=24, vocab_size=300)
    found = torch.load(tmp_path / "saved" / "logits.pt", weights_only=True)
    with torch.no_grad():
        expected = model_from_weights(sizes, truth())(torch.arange(megatron_core_job.TOKENS)[None])[0]
    assert_close(found, expected, terms=logit_terms(SMALL))
