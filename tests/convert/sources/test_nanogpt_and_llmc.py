"""nanoGPT's and llm.c's files become folders with the logits of a GPT of PyTorch's own layers."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from common.files import read_json
from convert.merge_mp import main
from convert.sources.find import open_source
from tests.convert.helpers import refused
from tests.helpers import run_main
from tests.numerics import assert_close, logit_terms
from tests.training.helpers import Capsys
from training.inference.load import load_model

LAYER = {  # GPT-2's names in order, and PyTorch's
    "ln_1.": "norm1.",
    "attn.c_attn.": "self_attn.in_proj_",
    "attn.c_proj.": "self_attn.out_proj.",
    "ln_2.": "norm2.",
    "mlp.c_fc.": "linear1.",
    "mlp.c_proj.": "linear2.",
}


class Gpt(nn.Module):
    """Three pre-norm layers, 16 channels, 4 heads, 12 positions, a tied head, random weights."""

    def __init__(self, rows: int, gelu: str, bias: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe, self.ln_f = nn.Embedding(rows, 16), nn.Embedding(12, 16), nn.LayerNorm(16, bias=bias)
        function = partial(F.gelu, approximate=gelu)
        options = {"batch_first": True, "norm_first": True, "bias": bias}
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 64, 0.0, function, **options) for _ in range(3))
        generator = torch.Generator().manual_seed(6)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.5, generator=generator)

    def weights(self) -> dict[str, Tensor]:
        """By GPT-2's names."""
        weights = self.state_dict()
        for ours, theirs in LAYER.items():
            weights = {name.replace(f".{theirs}", f".{ours}"): tensor for name, tensor in weights.items()}
        return weights


@torch.no_grad()
def assert_same_logits(folder: Path, truth: Gpt, vocabulary: int) -> None:
    """transformers and we compute the truth's logits from a folder."""
    tokens = torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(4))
    x = truth.wte(tokens) + truth.wpe.weight
    for layer in truth.h:
        x = layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(12), is_causal=True)
    expected = truth.ln_f(x) @ truth.wte.weight[:vocabulary].T
    theirs = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    for logits in (theirs(tokens).logits, load_model(folder)[0](tokens).cpu()):
        assert_close(logits, expected, terms=logit_terms(theirs.config))


def write_nanogpt(folder: Path, truth: Gpt, prefix: str = "", **args: Any) -> Path:
    """What nanoGPT's train.py saves."""
    model = {f"{prefix}transformer.{name}": tensor for name, tensor in truth.weights().items()}
    model[f"{prefix}lm_head.weight"] = model[f"{prefix}transformer.wte.weight"]
    args = {"block_size": 12, "bias": truth.ln_f.bias is not None, "dropout": 0.2, **args}
    args = {"n_layer": 3, "n_head": 4, "n_embd": 16, "vocab_size": len(truth.wte.weight), **args}
    torch.save({"model": model, "model_args": args, "iter_num": 600, "config": {}}, folder / "ckpt.pt")
    return folder


@pytest.mark.parametrize(
    ("bias", "prefix", "rows", "flags"),
    [(True, "", 65, ()), (False, "_orig_mod.", 50304, ()), (False, "", 65, ("--activation", "gelu_new"))],
)
def test_a_merged_nanogpt_has_its_logits_with_and_without_biases(
    tmp_path: Path, capsys: Capsys, bias: bool, prefix: str, rows: int, flags: tuple[str, ...]
) -> None:
    truth = Gpt(rows, "tanh" if flags else "none", bias)
    run, output = write_nanogpt(tmp_path, truth, prefix), tmp_path / "merged"
    assert run_main(main, "--checkpoint", run, "--output", output, *flags) == 0
    said = capsys.readouterr().err
    assert ("since May 2023" in said) == (not flags) and ("50257" in said) == (rows == 50304)
    assert said.count("GELU") == (not flags)
    assert read_json(output / "config.json")["activation_function"] == ("gelu_new" if flags else "gelu")
    assert_same_logits(output, truth, min(rows, 50257))
    assert read_json(output / "merge_report.json")["source"]["iteration"] == 600


def test_what_is_no_gpt2_of_nanogpt_is_refused_by_name(tmp_path: Path) -> None:
    truth = Gpt(65, "none", bias=False)
    refused(write_nanogpt(tmp_path, truth, rope=True), "ckpt.pt", "rope True")
    refused(write_nanogpt(tmp_path, truth, bias=True), "bias' is missing")
    refused(write_nanogpt(tmp_path, truth, n_layer=4), "n_layer is 4")
    refused(write_nanogpt(tmp_path, truth), "--num-heads is 2", "n_head 4", num_heads=2)
    for content in ({"model": {}}, {"model": {"wte.weight": 3}, "model_args": {"n_layer": 1}}, [1]):
        torch.save(content, tmp_path / "ckpt.pt")
        refused(tmp_path, "ckpt.pt", "model_args")


def write_llmc(path: Path, version: int = 3, magic: int = 20240326) -> Path:
    """The header, and all layers' tensors of each name together."""
    weights, sizes = Gpt(384, "tanh").weights(), (12, 300, 3, 4, 16, 384)
    order = [f"h.{layer}.{name}{kind}" for name in LAYER for kind in ("weight", "bias") for layer in range(3)]
    with path.open("wb") as file:
        file.write(np.array([magic, version, *sizes, *[0] * 248], dtype="<i4").tobytes())
        for name in ("wte.weight", "wpe.weight", *order, "ln_f.weight", "ln_f.bias"):
            tensor = weights[name] if version == 3 else weights[name].bfloat16().view(torch.int16)
            file.write(tensor.numpy().tobytes())
    return path


@pytest.mark.parametrize(("version", "dtype"), [(3, torch.float32), (5, torch.bfloat16)])
def test_a_merged_model_of_llm_c_has_its_logits(tmp_path: Path, version: int, dtype: torch.dtype) -> None:
    path, output = write_llmc(tmp_path / "model_00019560.bin", version), tmp_path / "merged"
    assert run_main(main, "--checkpoint", path, "--output", output) == 0
    assert_same_logits(output, Gpt(384, "tanh").to(dtype).float(), 300)
    assert f"torch.{read_json(output / 'config.json')['dtype']}" == str(dtype)
    assert read_json(output / "merge_report.json")["source"]["iteration"] == 19560


def test_a_run_stands_for_its_newest_model_and_files_of_other_names_are_given_themselves(tmp_path: Path) -> None:
    for name in ("model_00000100.bin", "model_00000020.bin"):
        write_llmc(tmp_path / name)
    write_llmc(tmp_path / "state_00000100_00000.bin", magic=20240527)
    assert open_source(tmp_path).iteration == 100
    path = write_llmc(tmp_path / "gpt2_124M.bin")
    refused(tmp_path, "gpt2_124M.bin, model_00000020.bin", "one of these files")
    assert open_source(path).iteration is None


def test_a_file_that_is_cut_off_or_of_another_version_is_refused(tmp_path: Path) -> None:
    path = write_llmc(tmp_path / "model_00000100.bin")
    refused(path, "--activation is gelu", activation="gelu")
    content = path.read_bytes()
    for size, said in ((len(content) - 1, "cut off"), (900, "cut off"), (4, "version 0")):
        path.write_bytes(content[:size])
        refused(tmp_path, path.name, said)
