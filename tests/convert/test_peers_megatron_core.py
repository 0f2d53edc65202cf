"""megatron-core's own model on CPU loads what we write, with equal logits; we read what it saves.

Needs `pip install --no-deps megatron-core`.
"""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from common.settings import ModelSettings
from convert.arguments import Options
from convert.sources.find import open_source
from convert.sources.source import Source
from convert.targets.huggingface import write_folder
from convert.targets.megatron import write_v3
from convert.targets.torch_dist import write
from tests.convert import megatron_core_job
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.helpers import as_conv1d, merged, source_of
from tests.numerics import assert_close, logit_terms
from training.inference.load import model_from_weights
from training.tensors import leaf_of

pytestmark = [
    pytest.mark.slow,
    # not importorskip: megatron-core takes seconds to import, which the jobs do
    pytest.mark.skipif(find_spec("megatron") is None, reason="pip install --no-deps megatron-core"),
]
OTHER = {"tied": False, "activation": "gelu", "n_inner": 64, "layer_norm_epsilon": 1e-3}
TOKENS = torch.arange(megatron_core_job.TOKENS)[None]


def loaded(folder: Path, tensor: int, pipeline: int, optimizer: str = "", **options: Any) -> tuple[Source, Tensor]:
    """What megatron-core saves after it has loaded the checkpoint in `folder`, and its logits."""
    saved = folder.with_name("saved")
    saved.mkdir()
    job = [sys.executable, megatron_core_job.__file__, folder, tensor, pipeline, saved, optimizer]
    result = subprocess.run(list(map(str, job)), capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return open_source(saved, Options(**options)), torch.load(saved / "logits.pt", weights_only=True)


@pytest.mark.parametrize(("tensor", "pipeline", "changes"), [(2, 2, {}), (2, 1, OTHER)])
def test_files_of_ranks_have_the_logits_of_transformers(
    tensor: int, pipeline: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    model, theirs = replace(SMALL, **changes), tmp_path / "theirs"
    theirs.mkdir()
    write_v3(as_conv1d(truth(model), model), tmp_path, tp=tensor, pp=pipeline)
    source, logits = loaded(tmp_path / "release", tensor, pipeline)
    assert source.model == model
    assert_equal(merged(source), truth(model), model)
    write_folder(theirs, source)
    with torch.no_grad():
        expected = GPT2LMHeadModel.from_pretrained(theirs).eval()(TOKENS).logits[0]
    assert_close(logits, expected, terms=logit_terms(model))


def test_torch_dist_has_our_logits_and_its_moments_are_read(tmp_path: Path) -> None:
    write(source_of(truth(), iteration=7), tmp_path, tp=2, pp=2)
    source, logits = loaded(tmp_path / "iter_0000007", 2, 2, vocab_size=SMALL.vocab_size)
    assert "stacked" in source.layout and "tensor 2 x pipeline 2" in source.layout
    assert (source.model, source.iteration, source.step) == (SMALL, 7, 1)
    assert_equal(merged(source), truth())
    first, second = merged(source, "exp_avg"), merged(source, "exp_avg_sq")
    for name, gradient in truth().items():  # Adam's first step
        torch.testing.assert_close(first[name], 0.1 * gradient)
        torch.testing.assert_close(second[name], 0.001 * gradient**2)
    sizes = ModelSettings(n_layer=4, n_head=8, n_embd=32, seq_len=24, vocab_size=300)
    with torch.no_grad():
        expected = model_from_weights(sizes, truth())(TOKENS)[0]
    assert_close(logits, expected, terms=logit_terms(SMALL))


@pytest.mark.parametrize(("optimizer", "tensor", "pipeline"), [("muon", 2, 1), ("dist_muon", 1, 2)])
def test_its_muon_keeps_a_momentum_of_every_matrix_position_embeddings_included(
    optimizer: str, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    write(source_of(truth(), iteration=7), tmp_path, tp=tensor, pp=pipeline)
    source, _ = loaded(tmp_path / "iter_0000007", tensor, pipeline, optimizer, vocab_size=SMALL.vocab_size)
    weights = truth()
    if optimizer == "dist_muon":
        weights = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
        assert "float32 masters (52 of 52 tensors)" in source.notes[0]
    assert_equal(merged(source), weights)
    assert (source.step, source.estimated) == (1, ("wpe.weight",))
    assert source.has_moments("muon") and not source.has_moments("adamw")
    first, second = merged(source, "exp_avg"), merged(source, "exp_avg_sq")
    muons = {name for name in truth() if leaf_of(name).conv1d} | {"wpe.weight"}
    assert first.keys() == truth().keys() and second.keys() == truth().keys() - muons
    for name, gradient in weights.items():
        torch.testing.assert_close(first[name], (0.25 if name in muons else 0.1) * gradient)
