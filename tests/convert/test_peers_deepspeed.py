"""Checkpoints that DeepSpeed itself writes, against its engine's and its own scripts' weights."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from convert.arguments import Options
from convert.assemble import HUGGING_FACE, assemble
from convert.sources import deepspeed
from convert.sources.source import Source

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
WORKER = Path(__file__).with_name("deepspeed_worker.py")
HEADS = Options(num_heads=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each ZeRO stage."""
    folder = tmp_path_factory.mktemp("deepspeed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKER)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


def load(path: Path) -> dict[str, Tensor]:
    """A file that the worker wrote."""
    content: dict[str, Tensor] = torch.load(path, weights_only=True)
    return content


def transformers_layout(source: Source) -> dict[str, Tensor]:
    """transformers' state dict, float32."""
    weights = {f"transformer.{name}": assemble(source, name, qkv=HUGGING_FACE, conv1d=True) for name in source.tensors}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return {key: tensor.float() for key, tensor in weights.items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_those_of_the_engine_and_of_its_scripts(runs: Path, stage: int) -> None:
    folder = runs / f"zero{stage}"
    source = deepspeed.open_folder(folder / "tag", HEADS)
    weights, engine, script = transformers_layout(source), load(folder / "truth_0.pt"), load(folder / "zero_to_fp32.pt")
    assert len(engine) == (28 if stage == 1 else 27) and sorted(script) == sorted(weights)
    for key, tensor in (*engine.items(), *script.items()):
        assert torch.equal(weights[key], tensor.float()), key
    if stage == 1:  # in the others a weight is not trained: no moments
        assert source.step == 3 and source.has_moments("adamw")
        for kind, moments in source.moments.items():
            for name, moment in moments.items():
                path = folder / "tag_universal" / "zero" / f"transformer.{name}" / f"{kind}.pt"
                assert torch.equal(moment.read(), load(path)["param"]), name
