"""Megatron-core itself loads what is written for it, computes transformers' logits, and saves what is read again."""

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from convert.assemble import HUGGING_FACE, assemble
from convert.sources.megatron import open_folder
from convert.sources.options import Options
from convert.sources.source import Source
from convert.targets.megatron import write_v3
from tests.convert import megatron_core_job
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.helpers import as_conv1d, merged

pytest.importorskip("megatron.core", reason="pip install -e '.[peers]', or pip install --no-deps megatron-core")


def logits_of(source: Source) -> Tensor:
    """transformers' logits for the tokens of the job."""
    model = source.model
    config = GPT2Config(
        **{name: value for name, value in asdict(model).items() if name.startswith("n_")},
        vocab_size=model.vocab_size,
        activation_function=model.activation,
        layer_norm_epsilon=model.layer_norm_epsilon,
        tie_word_embeddings=model.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    weights = {
        name if name == "lm_head.weight" else f"transformer.{name}": assemble(
            source, name, qkv=HUGGING_FACE, conv1d=True
        )
        for name in source.tensors
    }
    theirs = GPT2LMHeadModel(config)
    theirs.train(False)
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if model.tied else [], [])
    theirs.tie_weights()
    with torch.no_grad():
        logits: Tensor = theirs(torch.arange(megatron_core_job.TOKENS)[None]).logits[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipeline", "changes"),
    [
        (2, 2, {}),
        (2, 1, {"tied": False, "activation": "gelu", "n_inner": 64, "layer_norm_epsilon": 1e-3}),
    ],
)
def test_megatron_core_and_transformers_agree(
    tensor: int, pipeline: int, changes: dict[str, float], tmp_path: Path
) -> None:
    model = replace(SMALL, **changes)  # type: ignore[arg-type]
    weights = truth(model)
    written, saved = tmp_path / "written", tmp_path / "saved"
    written.mkdir()
    saved.mkdir()
    write_v3(as_conv1d(weights, model), written, tp=tensor, pp=pipeline)
    job = [sys.executable, megatron_core_job.__file__, written / "release", tensor, pipeline, saved]
    result = subprocess.run(list(map(str, job)), capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    source = open_folder(saved, Options())
    assert source.model == model
    assert_equal(merged(source), weights, model)
    expected = logits_of(source)
    found = torch.load(saved / "logits.pt", weights_only=True)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
