"""A path leads to exactly one checkpoint, or to one line that says what to do."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from convert.sources.find import open_source
from tests.convert.deepspeed_files import Run, write_tag
from tests.convert.encoded import SMALL
from tests.convert.helpers import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Hugging Face folder, which may lie anywhere."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("small") / "theirs"
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=4, vocab_size=11)).save_pretrained(path)
    return path


def run_with(folder: Path, run: Path, *names: str, **pointers: str) -> Path:
    """A run that holds copies of `folder` and files that point to them."""
    for name in names:
        shutil.copytree(folder, run / name)
    for name, text in pointers.items():
        (run / name.replace("_txt", ".txt")).write_text(text)
    return run


@pytest.mark.parametrize(
    ("pointers", "name"),
    [
        ({"latest": "global_step20\n"}, "global_step20"),
        ({"latest_checkpointed_iteration_txt": "10\n"}, "iter_0000010"),
        ({"latest_checkpointed_iteration_txt": "release"}, "release"),
    ],
)
def test_a_run_stands_for_the_checkpoint_that_its_pointer_names(
    folder: Path, tmp_path: Path, pointers: dict[str, str], name: str
) -> None:
    run = run_with(folder, tmp_path / "run", "iter_0000010", "global_step20", "release", **pointers)
    assert open_source(run).path == run / name


@pytest.mark.parametrize(
    ("names", "pointers", "parts"),
    [
        (("a", "b"), {}, ["a, b"]),
        (("a",), {"latest": "../a"}, ["latest: ", "'../a'"]),
        (("a",), {"latest": "empty"}, ["latest: ", "empty"]),
        (("a",), {"latest_checkpointed_iteration_txt": "30"}, ["iter_0000030"]),
    ],
)
def test_anything_else_is_one_line(
    folder: Path, tmp_path: Path, names: tuple[str, ...], pointers: dict[str, str], parts: list[str]
) -> None:
    (tmp_path / "run" / "empty").mkdir(parents=True)
    refused(run_with(folder, tmp_path / "run", *names, **pointers), *parts)


def test_a_single_checkpoint_needs_no_pointer_and_one_of_its_files_does_not_do(folder: Path, tmp_path: Path) -> None:
    assert open_source(run_with(folder, tmp_path / "run", "anything")).path == tmp_path / "run" / "anything"
    refused(folder / "config.json", str(folder))


def test_a_deepspeed_run_of_the_trainer_is_read_unless_weights_lie_beside_it(tmp_path: Path) -> None:
    """The Trainer writes config.json, tokenizer, latest and global_stepN/ into one folder."""
    write_tag(tmp_path / "global_step120", Run(2))
    (tmp_path / "latest").write_text("global_step120")
    constants = {"activation_function": "gelu", "layer_norm_epsilon": 1e-6}
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=8, n_embd=32, vocab_size=300, n_positions=24, **constants))
    model.config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    source = open_source(tmp_path)
    assert source.path == tmp_path / "global_step120" and source.tokenizer is not None
    assert source.model == replace(SMALL, activation="gelu", layer_norm_epsilon=1e-6)
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    assert source.path == tmp_path and str(tmp_path / "global_step120") in source.notes[-1]
