"""nanoGPT's ckpt.pt becomes a folder with the logits of its model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from common.files import read_json
from convert.merge_mp import main
from convert.sources.find import open_source
from tests.convert.pytorch_gpt import Gpt, assert_same_logits
from tests.convert.sources import checks
from tests.helpers import run_main
from tests.training.helpers import Capsys

refused = partial(checks.refused, open_source)


def write(folder: Path, truth: Gpt, prefix: str = "", **args: Any) -> Path:
    """What nanoGPT's train.py saves."""
    folder.mkdir(exist_ok=True)
    rows = len(truth.wte.weight)
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 16, "block_size": 12, "vocab_size": rows, "dropout": 0.2}
    content = {
        "model": {f"{prefix}transformer.{name}": tensor for name, tensor in truth.weights().items()}
        | {f"{prefix}lm_head.weight": truth.wte.weight.data},
        "optimizer": torch.optim.AdamW(truth.parameters()).state_dict(),
        "model_args": {**sizes, "bias": truth.ln_f.bias is not None, **args},
        "iter_num": 600,
        "best_val_loss": torch.tensor(3.25),
        "config": {"out_dir": "out"},
    }
    torch.save(content, folder / "ckpt.pt")
    return folder


@pytest.mark.parametrize(
    ("bias", "prefix", "rows", "flags"),
    [
        (True, "", 65, ()),
        (False, "_orig_mod.", 50304, ()),
        (False, "", 65, ("--activation", "gelu_new")),
    ],
)
def test_a_merged_nanogpt_has_its_logits_with_and_without_biases(
    tmp_path: Path, capsys: Capsys, bias: bool, prefix: str, rows: int, flags: tuple[str, ...]
) -> None:
    truth = Gpt(rows, partial(F.gelu, approximate="tanh") if flags else F.gelu, bias)
    run, output = write(tmp_path / "out", truth, prefix), tmp_path / "merged"
    assert run_main(main, "--checkpoint", run, "--output", output, *flags) == 0
    said = capsys.readouterr().err
    assert ("since May 2023" in said) == (not flags) and ("50257" in said) == (rows == 50304)
    assert_same_logits(output, truth, min(rows, 50257))
    source = read_json(output / "merge_report.json")["source"]
    assert (source["iteration"], source["facts"]["model_args"]["bias"]) == (600, bias)
    assert read_json(output / "config.json")["resid_pdrop"] == 0.2


def test_what_is_no_gpt2_of_nanogpt_is_refused_by_name(tmp_path: Path) -> None:
    truth = Gpt(65, F.gelu, bias=False)
    refused(write(tmp_path, truth, rope=True), "ckpt.pt", "rope True")
    refused(write(tmp_path, truth, bias=True), "bias' is missing")
    refused(write(tmp_path, truth, n_layer=4), "n_layer is 4")
    refused(write(tmp_path, truth), "--num-heads is 2", "n_head 4", num_heads=2)
    for content in ({"model": {}}, {"model": {"wte.weight": 3}, "model_args": {"n_layer": 1}}, [1]):
        torch.save(content, tmp_path / "ckpt.pt")
        refused(tmp_path, "ckpt.pt", "model_args")
