"""Megatron-core itself loads what is written for it, computes transformers' logits, and saves what is read again."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from convert.arguments import Options
from convert.sources.megatron import open_folder
from convert.targets.huggingface import write_folder
from convert.targets.megatron import write_v3
from tests.convert import megatron_core_job
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.helpers import as_conv1d, merged
from tests.numerics import assert_close, logit_terms

pytest.importorskip("megatron.core", reason="pip install -e '.[peers]', or pip install --no-deps megatron-core")
OTHER = {"tied": False, "activation": "gelu", "n_inner": 64, "layer_norm_epsilon": 1e-3}


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline", "changes"), [(2, 2, {}), (2, 1, OTHER)])
def test_megatron_core_and_transformers_agree(
    tensor: int, pipeline: int, changes: dict[str, float], tmp_path: Path
) -> None:
    model = replace(SMALL, **changes)  # type: ignore[arg-type]
    written, saved, theirs = (tmp_path / name for name in ("written", "saved", "theirs"))
    for folder in (written, saved, theirs):
        folder.mkdir()
    write_v3(as_conv1d(truth(model), model), written, tp=tensor, pp=pipeline)
    job = [sys.executable, megatron_core_job.__file__, written / "release", tensor, pipeline, saved]
    result = subprocess.run(list(map(str, job)), capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    source = open_folder(saved, Options())
    assert source.model == model
    assert_equal(merged(source), truth(model), model)
    write_folder(theirs, source)
    with torch.no_grad():
        tokens = torch.arange(megatron_core_job.TOKENS)[None]
        expected = GPT2LMHeadModel.from_pretrained(theirs).eval()(tokens).logits[0]
    found = torch.load(saved / "logits.pt", weights_only=True)
    assert_close(found, expected, terms=logit_terms(model))
