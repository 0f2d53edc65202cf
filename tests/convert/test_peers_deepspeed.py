"""Checkpoints that DeepSpeed itself writes, against what its engine and its own scripts say is in them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.errors import CheckpointError
from convert.assemble import HUGGING_FACE, assemble, read_sharded
from convert.sources import deepspeed, universal
from convert.sources.options import Options
from convert.sources.source import QKV, Source

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
WORKER = Path(__file__).with_name("deepspeed_worker.py")
HEADS = Options(num_heads=4)
ZERO = ("zero1", "zero1_bf16", "zero2", "zero2_bf16", "zero3_bf16")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of all three kinds of run."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for kind, ranks in (("zero", 2), ("pipeline", 2), ("tensor", 4)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        ended = subprocess.run(
            [*command, str(WORKER), kind, str(folder)],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
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


def logits(weights: dict[str, Tensor]) -> Tensor:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=4)).eval()
    model.load_state_dict({key: tensor.float() for key, tensor in weights.items()})
    with torch.no_grad():
        found: Tensor = model(torch.arange(48).view(3, 16)).logits
    return found


@pytest.mark.parametrize("name", ZERO)
def test_weights_and_logits_are_those_of_the_engine(runs: Path, name: str) -> None:
    source = deepspeed.open_folder(runs / name / "tag", HEADS)
    found, engine = transformers_layout(source), load(runs / name / "truth_0.pt")
    assert len(engine) == (28 if name.startswith("zero1") else 27)
    for key, tensor in engine.items():
        assert torch.equal(found[key], tensor), key
    if name == "zero1_bf16":
        return  # zero_to_fp32 does not read these
    script = load(runs / name / "zero_to_fp32.pt")
    assert sorted(script) == sorted(found)
    assert all(torch.equal(found[key], tensor.float()) for key, tensor in script.items())
    assert torch.equal(logits(found), logits(script))


@pytest.mark.parametrize("name", ["zero1", "zero1_bf16"])  # in the others a weight is not trained: no moments
def test_moments_are_those_of_the_universal_checkpoint(runs: Path, name: str) -> None:
    source = deepspeed.open_folder(runs / name / "tag", HEADS)
    assert source.step == 3 and len(source.moments) == 2
    for kind, moments in source.moments.items():
        for tensor_name, moment in moments.items():
            stored = load(runs / name / "tag_universal" / "zero" / f"transformer.{tensor_name}" / f"{kind}.pt")["param"]
            assert torch.equal(read_sharded(moment), stored), tensor_name
            assert stored.abs().max() > 0


@pytest.mark.parametrize("name", ZERO)
def test_universal_checkpoints_hold_the_same(runs: Path, name: str) -> None:
    tag = deepspeed.open_folder(runs / name / "tag", HEADS)
    folder = runs / name / "tag_universal"
    if name == "zero3_bf16":
        with pytest.raises(CheckpointError, match=r"'wpe.weight' is missing"):  # ds_to_universal drops it
            universal.open_folder(folder, HEADS)
        return
    source = universal.open_folder(folder, HEADS)
    found, expected = transformers_layout(source), transformers_layout(tag)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    assert source.step == 3 or not source.moments


def test_round_robin_gradients(runs: Path) -> None:
    """They put the data into another order, which DeepSpeed's engine and its universal checkpoints do not follow."""
    folder = runs / "zero2_bf16_round_robin"
    found, script = transformers_layout(deepspeed.open_folder(folder / "tag", HEADS)), load(folder / "zero_to_fp32.pt")
    assert all(torch.equal(found[key], tensor.float()) for key, tensor in script.items())
    module = torch.load(folder / "tag" / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    assert all(torch.equal(found[key].bfloat16(), tensor) for key, tensor in module.items())
    with pytest.raises(CheckpointError, match=r"differs by .* from the 16-bit weights.*round_robin_gradients"):
        universal.open_folder(folder / "tag_universal", HEADS)


def test_a_pipeline_of_two_stages(runs: Path) -> None:
    source = deepspeed.open_folder(runs / "pipeline" / "tag", HEADS)
    assert "pipeline 2 in 6 layer files" in source.layout and source.layout.endswith("float32 masters")
    assert (source.qkv, source.iteration, source.step) == (QKV(3), 2, 2)
    stages = [load(runs / "pipeline" / f"truth_{stage}.pt") for stage in range(2)]
    names = {
        "tied_modules.embed.word_embeddings.weight": "wte.weight",
        "tied_modules.embed.position_embeddings.weight": "wpe.weight",
        "3.self_attention.query_key_value.weight": "h.1.attn.c_attn.weight",
        "5.mlp.dense_4h_to_h.bias": "h.3.mlp.c_proj.bias",
        "6.weight": "ln_f.weight",
    }
    for key, name in names.items():
        stage = next(stage for stage in stages if key in stage)
        assert torch.equal(read_sharded(source.tensors[name]), stage[key]), key
    copy = source.tensors["wte.weight"].copies["pipeline stage 1"]
    assert torch.equal(read_sharded(copy), stages[1]["tied_modules.embed.word_embeddings.weight"])


def test_the_universal_checkpoint_of_a_pipeline_has_the_wrong_positions(runs: Path) -> None:
    """ds_to_universal takes those of the last stage, which are not trained, unless the model lists them."""
    folder = runs / "pipeline" / "tag_universal"
    key = "tied_modules.embed.position_embeddings.weight"
    taken = load(folder / "zero" / key / "fp32.pt")["param"]
    first, last = (load(runs / "pipeline" / f"truth_{stage}.pt")[key] for stage in range(2))
    assert torch.equal(taken, last) and not torch.equal(taken, first)
    with pytest.raises(CheckpointError, match="may be the unused copy of the last pipeline stage"):
        universal.open_folder(folder, HEADS)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_tensor_ranks_by_two_data_ranks(runs: Path, stage: int) -> None:
    """DeepSpeed's own script reads no tensor ranks below ZeRO 3."""
    source = deepspeed.open_folder(runs / f"tensor{stage}" / "tag", HEADS)
    assert f"ZeRO {stage} over 2 data ranks, tensor 2, names of Megatron, float32 masters" in source.layout
    assert source.qkv == QKV(0, 2)
    first, second = (load(runs / f"tensor{stage}" / f"truth_{rank}.pt") for rank in range(2))
    block = "transformer.layers.1"
    for key, name, dim in (
        ("word_embeddings.weight", "wte.weight", 0),
        (f"{block}.attention.query_key_value.weight", "h.1.attn.c_attn.weight", 0),
        (f"{block}.attention.dense.weight", "h.1.attn.c_proj.weight", 1),
        (f"{block}.mlp.dense_h_to_4h.bias", "h.1.mlp.c_fc.bias", 0),
        (f"{block}.mlp.dense_4h_to_h.weight", "h.1.mlp.c_proj.weight", 1),
    ):
        assert torch.equal(read_sharded(source.tensors[name]), torch.cat([first[key], second[key]], dim)), key
    norm = source.tensors["ln_f.weight"]
    assert torch.equal(read_sharded(norm), first["transformer.final_layernorm.weight"])
    assert torch.equal(read_sharded(norm.copies["tensor rank 1"]), second["transformer.final_layernorm.weight"])
