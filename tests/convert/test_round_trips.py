"""There and back again: Hugging Face -> Megatron -> Hugging Face gives the same bytes, and drops nothing silently."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from convert import merge_mp, to_megatron
from convert.targets.huggingface import write_folder
from convert.targets.megatron import write_v3
from tests.convert.encoded import SMALL, truth
from tests.convert.helpers import source_of
from tests.training.helpers import run_main

OTHER = {"tied": False, "n_inner": 96, "activation": "gelu", "layer_norm_epsilon": 1e-6}
SIZES = ("--num-heads", SMALL.n_head, "--vocab-size", SMALL.vocab_size)


@pytest.mark.parametrize(
    ("form", "tp", "pp", "dtype", "changes", "flags"),
    [
        ("2019", 4, 1, torch.float16, {}, SIZES),
        ("v3", 1, 1, torch.float32, {}, ()),
        ("v3", 2, 4, torch.bfloat16, OTHER, ()),
        ("torch_dist", 2, 2, torch.float32, OTHER, ()),
    ],
)
def test_the_weights_come_back_byte_for_byte(
    form: str,
    tp: int,
    pp: int,
    dtype: torch.dtype,
    changes: dict[str, Any],
    flags: tuple[object, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, middle, second = (tmp_path / name for name in ("first", "megatron", "second"))
    first.mkdir()
    model = replace(SMALL, **changes)
    write_folder(first, source_of({name: weight.to(dtype) for name, weight in truth(model).items()}, model))
    there = ("--checkpoint", first, "--output", middle, "--format", form, "--tp", tp, "--pp", pp)
    assert run_main(to_megatron.main, *there) == 0
    assert " ".join(map(str, flags)) in capsys.readouterr().err  # what the 2019 format does not record
    assert run_main(merge_mp.main, "--checkpoint", middle, "--output", second, *flags) == 0
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (second / name).read_bytes() == (first / name).read_bytes(), name


def test_a_written_checkpoint_that_computes_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(source: object, folder: Path, *, tp: int, pp: int) -> None:
        """Writes weights whose first two norms are exchanged."""
        weights = truth()
        one, two = "h.0.ln_1.weight", "h.0.ln_2.weight"
        write_v3(source_of(weights | {one: weights[two], two: weights[one]}), folder, tp=tp, pp=pp)

    (tmp_path / "first").mkdir()
    write_folder(tmp_path / "first", source_of(truth()))
    monkeypatch.setattr("convert.to_megatron._writer", lambda form: wrong)
    arguments = ("--checkpoint", tmp_path / "first", "--output", tmp_path / "out", "--tp", 2, "--format", "v3")
    assert run_main(to_megatron.main, *arguments) == 1
    assert "the attention of layer 0" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
