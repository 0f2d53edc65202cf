"""A tensor-parallel run becomes a folder that transformers loads with equal logits, or nothing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from common.errors import InputError
from common.progress import Meter
from convert.assemble import assemble
from convert.merge_mp import main, merge
from convert.proof import prove
from tests.conftest import Once
from tests.helpers import run_main
from tests.numerics import assert_close, logit_terms
from tests.training.helpers import copy_run, refusal
from training.huggingface.origin import digest, read_origin
from training.inference.load import load_model


@pytest.fixture
def run(tiny_run: Path) -> Path:
    """A model folder with checkpoints of two tensor-parallel processes, at 10 and 20."""
    return tiny_run / "models" / "tiny"


@pytest.fixture
def older(run: Path, once: Once, tmp_path: Path) -> Path:
    """A copy of an older result of this command, the only thing in `tmp_path`."""
    made = once("merged", lambda folder: merge(run / "iter_0000010", folder / "merged"))
    return Path(shutil.copytree(made / "merged", tmp_path / "merged"))


def files_of(folder: Path) -> dict[str, bytes | str]:
    """All files below a folder but run.json, which has a date; links as their targets."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or (path.is_file() and path.name != "run.json")
    }


def test_transformers_loads_the_merged_folder_with_equal_logits(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, meters = tmp_path / "merged", list[Meter]()

    def meter(*arguments: Any) -> Meter:
        meters.append(Meter(*arguments))
        return meters[-1]

    monkeypatch.setattr("convert.targets.merged.Meter", meter)
    assert run_main(main, "--checkpoint", run, "--output", output, "--dry-run") == 0 and not output.exists()
    assert run_main(main, "--checkpoint", run, "--output", output) == 0
    assert [meter.done for meter in meters] == [meter.total for meter in meters] != []
    theirs = GPT2LMHeadModel.from_pretrained(output).eval()
    assert theirs.config.vocab_size == 257  # the true vocabulary: padding is not exported
    ours, _ = load_model(run)
    tokens = torch.randint(257, (3, 16), generator=torch.Generator().manual_seed(9))
    assert_close(theirs(tokens).logits, ours(tokens).cpu(), terms=logit_terms(theirs.config))
    report = json.loads((output / "merge_report.json").read_text())
    assert report["source"]["files"]["rank_0_0.safetensors"] == digest(run / "iter_0000020" / "rank_0_0.safetensors")
    assert report["proof"]["tokens"] == 32 and report["proof"]["relative_difference"] < report["proof"]["tolerance"]
    names = ("README.md", "config.json", "generation_config.json", "model.safetensors")
    assert report["output"] == {name: digest(output / name) for name in names}
    origin = read_origin(output)
    assert origin is not None and (origin.iteration, origin.consumed_samples, origin.split) == (20, 160, "90,10,0")


def test_only_force_replaces_an_older_result(run: Path, older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def iteration() -> int:
        number: int = json.loads((older / "merge_report.json").read_text())["source"]["iteration"]
        return number

    first, arguments = files_of(older), ("--checkpoint", run, "--output", older)
    tenth = ("--checkpoint", run / "iter_0000010", "--output", older, "--force")
    assert f"{older}: " in refusal(capsys, main, *arguments) and files_of(older) == first
    assert run_main(main, *arguments, "--force") == 0
    assert iteration() == 20 and files_of(older)["model.safetensors"] != first["model.safetensors"]
    assert run_main(main, *tenth) == 0
    assert files_of(older) == first
    for name in ("config.json", "generation_config.json", "model.safetensors"):  # Snakemake removes what it declared
        (older / name).unlink()
    assert run_main(main, *tenth) == 0
    assert files_of(older) == first and sorted(path.name for path in older.parent.iterdir()) == ["merged"]


def test_a_merge_that_the_proof_rejects_ends_with_code_1_and_leaves_the_older_result(
    run: Path, older: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(source: Any, name: str, **how: Any) -> torch.Tensor:
        tensor = assemble(source, name, **how)
        return tensor.roll(1, 0) if name == "h.1.attn.c_proj.weight" else tensor

    monkeypatch.setattr("convert.assemble.assemble", wrong)
    before = files_of(older.parent)
    for output in (older, older.parent / "new"):
        assert run_main(main, "--checkpoint", run, "--output", output, "--force") == 1
        error = capsys.readouterr().err
        assert "the attention of layer 1" in error and error.count("\n") == 1
    assert files_of(older.parent) == before and os.listdir(older.parent) == ["merged"]


FOREIGN: dict[str, Callable[[Path], object]] = {
    "README.md": lambda folder: (folder / "README.md").write_text("card"),
    "vocab.json": lambda folder: (folder / "vocab.json").symlink_to("x"),
    "config.json": lambda folder: (folder / "config.json").write_text("{}"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_with_foreign_files_is_never_replaced(
    run: Path, older: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    FOREIGN[name](older)
    before = files_of(older.parent)
    for force in ((), ("--force",)):
        assert f"{older / name}: " in refusal(capsys, main, "--checkpoint", run, "--output", older, *force)
    assert files_of(older.parent) == before


@pytest.mark.parametrize("output", ["HERE/a link", "HERE/thesis", "HERE/merged", "RUN", "RUN/iter_0000010/merged"])
def test_an_unsuitable_output_gives_one_line(
    run: Path, older: Path, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = older.parent
    (here / "a link").symlink_to("there")
    (here / "there").mkdir()
    (here / "thesis").mkdir()
    (here / "thesis" / "config.json").write_text("{}")
    monkeypatch.chdir(older)  # HERE/merged
    before = [files_of(here), files_of(run)]
    target = output.replace("RUN", str(run)).replace("HERE", str(here))
    refusal(capsys, main, "--checkpoint", run, "--output", target, "--force")
    assert [files_of(here), files_of(run)] == before


def test_a_result_that_appears_meanwhile_is_not_replaced(
    run: Path, older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = older.with_name("target")

    def meanwhile(*arguments: Any) -> Any:
        shutil.copytree(older, target)
        return prove(*arguments)

    monkeypatch.setattr("convert.targets.merged.prove", meanwhile)
    with pytest.raises(InputError, match="target"):
        merge(run, target)
    assert files_of(target) == files_of(older)


def test_a_damaged_checkpoint_is_never_merged(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_run(tiny_run, tmp_path / "run")
    checkpoint = tmp_path / "run" / "models" / "tiny" / "iter_0000020"
    path = checkpoint / "rank_0_0.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    assert str(path) in refusal(capsys, main, "--checkpoint", checkpoint, "--output", tmp_path / "merged")
    assert os.listdir(tmp_path) == ["run"]
