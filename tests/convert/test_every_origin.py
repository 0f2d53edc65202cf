"""The commands on a checkpoint of every origin: verified, and merged with the model's logits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from common.settings import ModelSettings
from convert import verify
from convert.merge_mp import main
from tests.convert import deepspeed_files, megatron_files
from tests.convert.encoded import SMALL, truth
from tests.convert.sources import torch_dist_files
from tests.helpers import assert_one_line_error, called, run_main
from tests.numerics import assert_close, logit_terms, tolerance
from training.inference.load import load_model, model_from_weights

Maker = Callable[[Path], object]
SIZES = ("--num-heads", SMALL.n_head, "--vocab-size", SMALL.vocab_size)


def megatron(**layout: Any) -> Maker:
    def make(run: Path) -> None:
        megatron_files.write(run / "iter_0000100", megatron_files.Layout(**layout))
        (run / "latest_checkpointed_iteration.txt").write_text("100\n")

    return make


def torch_dist(**layout: Any) -> Maker:
    def make(run: Path) -> None:
        torch_dist_files.write_folder(run / "iter_0000100", truth(), **layout).close()
        (run / "latest_checkpointed_iteration.txt").write_text("100")

    return make


def deepspeed(**settings: Any) -> Maker:
    def make(run: Path) -> None:
        run.mkdir()
        deepspeed_files.write_tag(run / "global_step120", deepspeed_files.Run(**settings))
        (run / "latest").write_text("global_step120")

    return make


ORIGINS = [
    pytest.param(megatron(names="2019", version=None, tensor=2), SIZES, id="2019"),
    pytest.param(megatron(names="transformer", version=1, tensor=4, pipeline=2), (), id="qkv version 1"),
    pytest.param(megatron(names="core", version=3.0, pipeline=2, chunks=2), (), id="interleaved"),
    pytest.param(torch_dist(tp=2, pp=2, stacked=True), (), id="torch_dist"),
    pytest.param(deepspeed(stage=3, data=3), SIZES, id="ZeRO 3"),
    pytest.param(deepspeed(stage=1, names="megatron", pipeline=2), (), id="pipeline"),
]
"""(maker, flags of the command)."""
OLD = ORIGINS[0].values[0]  # before torch 1.6, without checksums


@pytest.mark.parametrize(("make", "flags"), ORIGINS)
def test_a_checkpoint_of_any_origin_is_whole_and_gives_transformers_the_same_logits(
    tmp_path: Path, make: Maker, flags: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "run")
    output, count = tmp_path / "merged", f"{sum(tensor.numel() for tensor in truth().values()):,}"
    assert run_main(verify.main, tmp_path / "run", *flags) == 0
    said = capsys.readouterr().out
    assert f"{count} parameters" in said and "\n  whole; " in said and ("without a checksum" in said) == (make is OLD)
    assert run_main(main, "--checkpoint", tmp_path / "run", "--output", output, *flags) == 0
    capsys.readouterr()
    assert run_main(verify.main, output) == 0
    said = capsys.readouterr().out
    assert f"{count} parameters" in said and "\n  whole; " in said and "without a checksum" not in said
    tokens = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(4))
    sizes = ModelSettings(n_layer=4, n_head=8, n_embd=32, seq_len=24, vocab_size=300)
    with torch.no_grad():
        logits = model_from_weights(sizes, truth())(tokens)
        theirs = GPT2LMHeadModel.from_pretrained(output, dtype=torch.float32).eval()(tokens).logits
        ours = load_model(output)[0](tokens).cpu()
    for result in (theirs, ours):
        assert_close(result, logits, terms=logit_terms(SMALL))
    report = json.loads((output / "merge_report.json").read_text())
    assert report["proof"]["relative_difference"] <= tolerance(logit_terms(SMALL)) and not report["replicas"]["drifted"]
    card, samples = (output / "README.md").read_text(), report["source"]["consumed_samples"]
    assert f"| parameters | {count} |" in card and "license:" in card
    assert f"| samples | {samples:,} |" in card if samples is not None else "| samples |" not in card


def test_drift_that_was_planted_in_one_replica_is_reported_with_its_tensor_and_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drift(content: dict[str, Any]) -> None:
        content["model"]["decoder.layers.2.mlp.linear_fc2.bias"][5] += 0.25

    megatron(names="core", version=3.0, tensor=4)(tmp_path / "run")
    deepspeed_files.inside("*/mp_rank_03/*", drift)(tmp_path / "run")
    assert run_main(main, "--checkpoint", tmp_path / "run", "--output", tmp_path / "merged") == 0
    warning = capsys.readouterr().err
    assert "0.25" in warning and "h.2.mlp.c_proj.bias of tensor rank 3" in warning
    report = json.loads((tmp_path / "merged" / "merge_report.json").read_text())["replicas"]
    assert report["compared"] == report["equal"] + 1 > 60
    assert report["drifted"] == {"h.2.mlp.c_proj.bias": {"tensor rank 3": {"elements": 1, "largest_difference": 0.25}}}


CORE = megatron(names="core", version=3.0, tensor=2, pipeline=2)
RANK = "run/iter_0000100/mp_rank_01_001"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("folder", "spoil", "named"),
    [
        ("run", lambda here: flip(here / RANK / "model_optim_rng.pt"), (RANK,)),
        ("run", lambda here: shutil.rmtree(here / RANK), (RANK, "missing")),
        (
            "run",
            lambda here: shutil.copyfile(
                here / RANK.replace("_01_", "_00_") / "model_optim_rng.pt", here / RANK / "model_optim_rng.pt"
            ),
            (RANK, "mp_rank_00_001", "copied"),
        ),
        ("merged", lambda here: flip(here / "merged" / "model.safetensors"), ("merged/model.safetensors",)),
        ("merged", lambda here: flip(here / "merged" / "README.md"), ("merged/README.md",)),
        ("merged", lambda here: (here / "merged" / "merge_report.json").unlink(), ("merge_report.json", "missing")),
        ("merged", lambda here: (here / "merged" / "training.json").write_text("{"), ("training.json",)),
    ],
)
def test_what_is_damaged_missing_or_copied_is_named_in_a_line(
    folder: str, spoil: Callable[[Path], object], named: tuple[str, ...], tmp_path: Path
) -> None:
    CORE(tmp_path / "run")
    if folder == "merged":
        assert run_main(main, "--checkpoint", tmp_path / "run", "--output", tmp_path / "merged") == 0
    spoil(tmp_path)
    assert_one_line_error(called("convert.verify", tmp_path / folder), *named)


def test_the_last_save_of_a_run_is_meant_even_if_an_older_one_is_whole(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_run / "models" / "tiny", tmp_path / "tiny"))
    assert run_main(verify.main, model) == 0 and "iteration 20, " in capsys.readouterr().out
    flip(model / "iter_0000020" / "rank_0_0.safetensors")
    assert_one_line_error(called("convert.verify", model), "iter_0000020/rank_0_0.safetensors")
