"""One command says what any checkpoint is and that it is whole, or names what is damaged, missing or copied."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from convert.merge_mp import main as merge
from convert.verify import main
from tests.convert.test_every_origin import megatron
from tests.helpers import assert_one_line_error, called, run_main

CORE = megatron(names="core", version=3.0, tensor=2, pipeline=2)
RANK = "run/iter_0000100/mp_rank_01_001"


def verified(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert run_main(main, *words) == 0
    return capsys.readouterr().out


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
        assert run_main(merge, "--checkpoint", tmp_path / "run", "--output", tmp_path / "merged") == 0
    spoil(tmp_path)
    assert_one_line_error(called("convert.verify", tmp_path / folder), *named)


def test_the_last_save_of_a_run_is_meant_even_if_an_older_one_is_whole(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_run / "models" / "tiny", tmp_path / "tiny"))
    assert "iteration 20, " in verified(capsys, model)
    flip(model / "iter_0000020" / "rank_0_0.safetensors")
    assert_one_line_error(called("convert.verify", model), "iter_0000020/rank_0_0.safetensors")
