"""llm.c's model_*.bin becomes a folder with the logits of its model."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common.files import read_json
from convert.merge_mp import main
from convert.sources.find import open_source
from tests.convert.pytorch_gpt import LAYER, Gpt, assert_same_logits
from tests.convert.sources import checks
from tests.helpers import run_main

refused = partial(checks.refused, open_source)
SIZES = (12, 300, 3, 4, 16, 384)  # positions, tokens, layers, heads, width, rows


def write(path: Path, truth: Gpt, version: int = 3, magic: int = 20240326) -> Path:
    """The header, and all layers' tensors of each name together."""
    path.parent.mkdir(exist_ok=True)
    header = np.zeros(256, dtype="<i4")
    header[:8] = (magic, version, *SIZES)
    weights = truth.weights()
    order = [f"h.{layer}.{name}.{kind}" for name in LAYER for kind in ("weight", "bias") for layer in range(3)]
    with path.open("wb") as file:
        file.write(header.tobytes())
        for name in ("wte.weight", "wpe.weight", *order, "ln_f.weight", "ln_f.bias"):
            tensor = weights[name] if version == 3 else weights[name].bfloat16().view(torch.int16)
            file.write(tensor.numpy().tobytes())
    return path


def model() -> Gpt:
    truth = Gpt(384, partial(F.gelu, approximate="tanh"))
    truth.wte.weight.data[300:] = 0  # padding
    return truth


@pytest.mark.parametrize("version", [3, 5])
def test_a_merged_model_of_llm_c_has_its_logits_in_both_types(tmp_path: Path, version: int) -> None:
    truth = model()
    path, output = write(tmp_path / "log" / "model_00019560.bin", truth, version), tmp_path / "merged"
    assert run_main(main, "--checkpoint", path, "--output", output) == 0
    if version == 5:
        truth = truth.bfloat16().float()
    assert_same_logits(output, truth, 300)
    config, source = read_json(output / "config.json"), read_json(output / "merge_report.json")["source"]
    assert (config["dtype"], source["iteration"]) == ("float32" if version == 3 else "bfloat16", 19560)
    assert list(source["files"]) == [path.name]


def test_a_run_stands_for_its_newest_model_and_files_of_any_name_are_given_themselves(tmp_path: Path) -> None:
    truth = model()
    for name in ("model_00000100.bin", "model_00000020.bin"):
        write(tmp_path / name, truth)
    write(tmp_path / "state_00000100_00000.bin", truth, magic=20240527)
    assert open_source(tmp_path).iteration == 100
    path = write(tmp_path / "gpt2_124M.bin", truth)
    refused(tmp_path, "gpt2_124M.bin, model_00000020.bin", "one of these files")
    assert open_source(path).iteration is None


def test_a_model_that_is_cut_off_or_of_another_version_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model_00000100.bin", model())
    refused(path, "--activation is gelu", activation="gelu")
    refused(path, "--num-heads is 2", num_heads=2)
    whole = path.read_bytes()
    for size in (len(whole) - 1, 900, 4):
        path.write_bytes(whole[:size])
        refused(tmp_path, path.name, "version 0" if size == 4 else "cut off")
    path.write_bytes(whole[:4] + bytes([1]) + whole[5:])
    refused(path, "version 1")
