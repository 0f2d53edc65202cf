"""There and back again: Hugging Face -> Megatron -> Hugging Face gives the same bytes, and drops nothing silently."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convert import merge_mp, to_megatron
from convert.sources.options import Options
from convert.targets.huggingface import write_folder
from tests.convert.encoded import SMALL, truth
from tests.convert.helpers import source_of
from tests.training.helpers import run_main

SIZES = Options(num_heads=SMALL.n_head, vocab_size=SMALL.vocab_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "tp", "pp"),
    [("2019", 1, 1), ("2019", 4, 1), ("v3", 1, 1), ("v3", 8, 1), ("v3", 2, 4), ("torch_dist", 2, 2)],
)
def test_the_weights_come_back_byte_for_byte(tmp_path: Path, form: str, tp: int, pp: int, dtype: torch.dtype) -> None:
    (tmp_path / "first").mkdir()
    write_folder(tmp_path / "first", source_of({name: weight.to(dtype) for name, weight in truth().items()}))
    said = to_megatron.convert(tmp_path / "first", tmp_path / "megatron", form=form, tp=tp, pp=pp)
    assert f"Megatron-LM ({form}), tensor {tp} x pipeline {pp}" in said and "logits equal the source's within" in said
    merge_mp.merge(tmp_path / "megatron", tmp_path / "second", options=SIZES)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes(), name


def test_a_head_of_its_own_another_width_and_the_other_gelu_survive_v3(tmp_path: Path) -> None:
    model = replace(SMALL, tied=False, n_inner=96, activation="gelu", layer_norm_epsilon=1e-6)
    (tmp_path / "first").mkdir()
    write_folder(tmp_path / "first", source_of(truth(model), model))
    to_megatron.convert(tmp_path / "first", tmp_path / "megatron", form="v3", tp=2, pp=2)
    merge_mp.merge(tmp_path / "megatron", tmp_path / "second")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes(), name


def test_a_written_checkpoint_that_computes_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "first").mkdir()
    write_folder(tmp_path / "first", source_of(truth()))
    monkeypatch.setattr("convert.to_megatron._writer", lambda form: wrong_writer)
    arguments = ("--checkpoint", tmp_path / "first", "--output", tmp_path / "out", "--tp", 2, "--format", "v3")
    assert run_main(to_megatron.main, *arguments) == 1
    assert "the attention of layer 0 of the result differs from the source's" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def wrong_writer(source: object, folder: Path, *, tp: int, pp: int) -> None:
    """Writes weights whose first two norms are exchanged."""
    from convert.targets.megatron import write_v3

    weights = truth()
    weights["h.0.ln_1.weight"], weights["h.0.ln_2.weight"] = weights["h.0.ln_2.weight"], weights["h.0.ln_1.weight"]
    write_v3(source_of(weights), folder, tp=tp, pp=pp)
