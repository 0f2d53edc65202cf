"""A tensor-parallel run becomes one folder that transformers loads with equal logits, or nothing at all."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from common.errors import InputError
from common.folders import replace_folder
from convert.assemble import assemble
from convert.merge_mp import main, merge
from convert.proof import prove
from convert.sources.options import Options
from tests.conftest import Command
from tests.training.helpers import launch_ok, make_run, run_main
from training.inference.load import load_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder after 4 iterations over two tensor-parallel processes."""
    folder = tmp_path_factory.mktemp("run")
    config = make_run(folder, parallel={"tensor": 2}, train={"save_interval": 2})
    launch_ok(2, "training.train", "--config", config, "--model", "tiny")
    return folder / "models" / "tiny"


def test_transformers_loads_the_merged_folder_with_equal_logits(run: Path, tmp_path: Path, command: Command) -> None:
    output = tmp_path / "merged"
    result = command("convert.merge_mp", "--checkpoint", run, "--output", output)
    assert (result.returncode, result.stderr) == (0, "")
    assert "iter_0000004: this toolkit, 2 layers, data 1 x tensor 2" in result.stdout
    assert "merged from" in result.stdout and "logits equal the source's within" in result.stdout
    theirs = GPT2LMHeadModel.from_pretrained(output).eval()
    assert theirs.config.vocab_size == 257  # the true vocabulary: padding is not exported
    ours, _ = load_model(run)
    tokens = torch.randint(257, (3, 16), generator=torch.Generator().manual_seed(9))
    expected = ours(tokens).cpu()
    assert (theirs(tokens).logits - expected).abs().max() <= 1e-4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_iteration_selects_a_checkpoint_and_only_force_replaces_an_older_result(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "merged"
    assert "iter_0000002" in merge(run / "iter_0000002", output)
    first = (output / "model.safetensors").read_bytes()
    assert run_main(main, "--checkpoint", run, "--output", output) == 2
    assert "exists already; --force replaces it\n" in capsys.readouterr().err
    assert (output / "model.safetensors").read_bytes() == first
    assert "iter_0000004" in merge(run, output, force=True)
    assert (output / "model.safetensors").read_bytes() != first
    assert "iter_0000002" in merge(run, output, options=Options(iteration=2), force=True)
    assert (output / "model.safetensors").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]
    assert run_main(main, "--checkpoint", run, "--iteration", 3, "--output", tmp_path / "other") == 2
    assert "no checkpoint of iteration 3; there are iter_0000002, iter_0000004\n" in capsys.readouterr().err
    assert run_main(main, "--checkpoint", run / "iter_0000002", "--iteration", 2, "--output", tmp_path / "other") == 2
    assert "--iteration needs the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("spoil", [lambda tensor: tensor.t().contiguous(), lambda tensor: tensor.roll(1, 0)])
def test_a_merge_that_the_proof_rejects_ends_with_code_1_and_leaves_nothing(
    run: Path,
    tmp_path: Path,
    spoil: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(source: Any, name: str, **how: Any) -> torch.Tensor:
        tensor = assemble(source, name, **how)
        return spoil(tensor) if name == "h.1.attn.c_proj.weight" else tensor

    monkeypatch.setattr("convert.ahead.assemble", wrong)
    assert run_main(main, "--checkpoint", run, "--output", tmp_path / "merged") == 1
    error = capsys.readouterr().err
    assert "the attention of layer 1 of the result differs from the source's by" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_it_found_and_writes_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--checkpoint", run, "--output", tmp_path / "merged", "--dry-run", "--dtype", "float16")
    assert run_main(main, *arguments, "--max-shard-size", "20KB") == 0
    said = capsys.readouterr().out
    assert "would have 28 tensors, 0.00 GB of float16 in 4 files; vocabulary 257, 4 heads" in said
    assert not list(tmp_path.iterdir())


def test_the_report_says_what_was_merged_and_how_it_was_proved(run: Path, tmp_path: Path) -> None:
    merge(run, tmp_path / "merged")
    report = json.loads((tmp_path / "merged" / "merge_report.json").read_text())
    assert report["source"]["iteration"] == 4 and "__0_0.distcp" in report["source"]["files"]
    assert report["replicas"] == {"compared": 0, "equal": 0, "drifted": {}}
    assert report["proof"]["tokens"] == 32 and report["proof"]["relative_difference"] < report["proof"]["tolerance"]
    assert report["output"].keys() == {"config.json", "generation_config.json", "model.safetensors"}
    card = json.loads((tmp_path / "merged" / "run.json").read_text())
    assert card["inputs"][0]["path"] == report["source"]["path"] and "run.json" not in report["output"]


@pytest.fixture(scope="module")
def merged(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An older result of this command."""
    folder = tmp_path_factory.mktemp("older") / "merged"
    merge(run, folder)
    return folder


def files_of(folder: Path) -> dict[str, bytes | str]:
    """All files below a folder but run.json, which has a date; links as their targets."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or (path.is_file() and path.name != "run.json")
    }


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        ("a file of another name", lambda folder: (folder / "README.md").write_text("card"), "README.md: not a file"),
        ("a folder", lambda folder: (folder / "src").mkdir(), "src: not a file"),
        ("a link", lambda folder: (folder / "pytorch_model.bin").symlink_to("x"), "pytorch_model.bin: not a file"),
        ("a link of our name", lambda folder: (folder / "vocab.json").symlink_to("x"), "vocab.json: not a file"),
        ("a changed file", lambda folder: (folder / "config.json").write_text("{}"), "config.json: not a file"),
        ("no training.json", lambda folder: (folder / "training.json").unlink(), "config.json: not a file"),
        ("a torn training.json", lambda folder: (folder / "training.json").write_text("[]"), "config.json: not a file"),
        ("tokenizer files", lambda folder: (folder / "merges.txt").write_text("x"), "merges.txt: not a file"),
    ],
)
def test_a_folder_with_foreign_files_is_never_replaced(
    run: Path,
    merged: Path,
    tmp_path: Path,
    name: str,
    spoil: Callable[[Path], object],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "target"
    shutil.copytree(merged, target)
    spoil(target)
    before = files_of(tmp_path)
    for force in ((), ("--force",)):
        assert run_main(main, "--checkpoint", run, "--output", target, *force) == 2, name
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1, name
    assert files_of(tmp_path) == before, name


def test_the_remains_that_snakemake_leaves_are_replaced(run: Path, merged: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(merged, target)
    for declared in ("config.json", "generation_config.json", "model.safetensors"):
        (target / declared).unlink()
    merge(run, target, force=True)
    assert files_of(target) == files_of(merged)
    empty = tmp_path / "empty"
    empty.mkdir()
    merge(run, empty)
    assert files_of(empty) == files_of(merged)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("a file", "a file: is not a folder"),
        ("a link", "a symbolic link"),
        (".", "cannot be replaced; name a folder inside it"),
        ("..", "cannot be replaced; name a folder inside it"),
        ("/", "cannot be replaced; name a folder inside it"),
        ("RUN", "would overwrite the input"),
        ("RUN/iter_0000002", "is inside the checkpoint"),
        ("RUN/iter_0000002/merged", "is inside the checkpoint"),
        ("a file/merged", "a file: is not a folder"),
        ("HERE", "the working directory is in there"),
        ("thesis", "chapter1.tex: not a file that this command wrote"),
    ],
)
def test_an_unsuitable_output_gives_one_line(
    run: Path,
    tmp_path: Path,
    output: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a file").write_text("x")
    (tmp_path / "there").mkdir()
    (tmp_path / "a link").symlink_to("there")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    (tmp_path / "thesis" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    before = [files_of(tmp_path), files_of(run)]
    assert (
        run_main(
            main,
            "--checkpoint",
            run,
            "--output",
            output.replace("RUN", str(run)).replace("HERE", str(tmp_path)),
            "--force",
        )
        == 2
    )
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert [files_of(tmp_path), files_of(run)] == before


def test_a_result_that_appears_meanwhile_is_not_replaced(
    run: Path, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*arguments: Any) -> Any:
        shutil.copytree(merged, tmp_path / "merged")
        return prove(*arguments)

    monkeypatch.setattr("convert.proof.prove", meanwhile)
    with pytest.raises(InputError, match="merged: exists already; --force replaces it"):
        merge(run / "iter_0000002", tmp_path / "merged")
    assert files_of(tmp_path / "merged") == files_of(merged)


def test_an_interrupted_write_leaves_the_older_result_and_its_neighbours(merged: Path, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    shutil.copytree(merged, target)
    for name in ("merged.old", "merged.tmp"):  # foreign folders with such names stay
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    before = files_of(tmp_path)
    with pytest.raises(KeyboardInterrupt), replace_folder(target, lambda old, new: None) as temporary:
        (temporary / "config.json").write_text("new")
        raise KeyboardInterrupt
    assert files_of(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("absent", "no such folder"),
        ("iter_0000009", "no checkpoint here"),
        ("empty", "no checkpoint here"),
        ("list", "not the manifest of a checkpoint; damaged"),
        ("text", "not the manifest of a checkpoint; damaged"),
        ("mapping", "not the manifest of a checkpoint; damaged"),
    ],
)
def test_an_unmergeable_checkpoint_gives_one_line(
    tmp_path: Path, folder: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "iter_0000009").mkdir()
    (tmp_path / "empty").mkdir()
    for name, content in (("list", "[]"), ("text", '"x"'), ("mapping", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(content)
    assert run_main(main, "--checkpoint", tmp_path / folder, "--output", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
