"""A fine-tuned run starts with the loss of its initial model, in every layout, and only on its first start."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import GPT2LMHeadModel

from common.errors import ConfigError
from common.files import read_rows
from tests.training.helpers import (
    BYTE_VOCABULARY,
    Capsys,
    byte_documents,
    launch_ok,
    make_run,
    refusal,
    settings_of,
    train_tiny,
    write_corpus,
)
from tests.training.reference import random_gpt2
from training.run_plan import make_plan
from training.train import main

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 24, "bos_token_id": 256, "eos_token_id": 256}
TRAIN = {"iterations": 1, "lr": 1e-9, "min_lr": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GPT2LMHeadModel]:
    """A GPT-2 and its folder as transformers writes it, with several weight files."""
    model = random_gpt2(**SIZES, vocab_size=BYTE_VOCABULARY, attn_pdrop=0.3)
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder, model


def finetuned(folder: Path, start: Path, **sections: Any) -> Path:
    """A configuration whose model starts from `start`, with 16 of its 24 positions."""
    sections = {"train": TRAIN, **sections, "model": {"dropout": 0.0, **sections.get("model", {})}}
    config = make_run(folder, **sections)
    raw = yaml.safe_load(config.read_text())
    raw["models"]["tiny"]["finetune"] = str(start)
    config.write_text(yaml.safe_dump(raw))
    return config


def assert_first_loss(config: Path, model: GPT2LMHeadModel) -> None:
    """The run's first loss is that of transformers on its first global batch."""
    found = float(read_rows(settings_of(config).model_folder("tiny") / "train.csv")[0]["lm_loss"])
    samples = make_plan(settings_of(config), "tiny").data.train
    tokens = torch.stack([torch.from_numpy(samples.sample(number)) for number in range(8)])
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_the_first_loss_is_the_initial_models_and_a_resumed_run_does_not_need_its_folder(
    tmp_path: Path, model: tuple[Path, GPT2LMHeadModel], capsys: Capsys
) -> None:
    start = tmp_path / "start"
    shutil.copytree(model[0], start)
    config = finetuned(tmp_path / "run", start)
    assert train_tiny(config) == 0
    assert f"weights of {start}\n" in capsys.readouterr().out
    assert_first_loss(config, model[1])
    shutil.rmtree(start)
    assert train_tiny(config, "train.iterations=2") == 0
    assert "resumed from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (2, {"tensor": 2}),
        pytest.param(4, {"pipeline": 2, "data": 2, "zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param(4, {"tensor": 2, "data": 2, "zero_stage": 1, "sequence_parallel": True}, marks=pytest.mark.slow),
    ],
)
def test_every_layout_starts_with_the_same_loss(
    tmp_path: Path, model: tuple[Path, GPT2LMHeadModel], size: int, parallel: dict[str, Any]
) -> None:
    config = finetuned(tmp_path, model[0], parallel=parallel)
    launch_ok(size, "training.train", "--config", config, "--model", "tiny")
    assert_first_loss(config, model[1])


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ({"n_layer": 3}, r"models\.tiny\.model\.n_layer is 3, but .*/config\.json has 2"),
        ({"n_head": 2}, r"models\.tiny\.model\.n_head is 2, but .* has 4"),
        ({"n_embd": 64}, r"models\.tiny\.model\.n_embd is 64, but .* has 32"),
        ({"seq_len": 25}, r"models\.tiny\.model\.seq_len is 25, but .* has 24"),
        ({"vocab_size": 300}, r"vocab_size is 300, but "),
    ],
)
def test_another_architecture_is_refused_by_key_before_anything_is_computed(
    tmp_path: Path, model: tuple[Path, GPT2LMHeadModel], section: dict[str, Any], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        config = finetuned(tmp_path, model[0], model=section)
        write_corpus(settings_of(config).dataset_prefix, byte_documents(60), section.get("vocab_size", 257))
        make_plan(settings_of(config), "tiny")


def test_padding_rows_of_a_foreign_model_are_left_out_with_a_note_in_the_plan(tmp_path: Path) -> None:
    """320 rows are 257 rounded up to a multiple of 64, as 50,304 are 50,257."""
    theirs = random_gpt2(**SIZES, vocab_size=320)
    theirs.save_pretrained(tmp_path / "padded")
    run = finetuned(tmp_path / "run", tmp_path / "padded")
    assert "63 of 320 embedding rows" in str(make_plan(settings_of(run), "tiny"))
    assert train_tiny(run) == 0
    trimmed = torch.nn.Linear(32, 257, bias=False)
    trimmed.weight = torch.nn.Parameter(theirs.transformer.wte.weight[:257].detach())
    theirs.lm_head = trimmed
    assert_first_loss(run, theirs)


def test_a_missing_or_incomplete_folder_gives_one_line(
    tmp_path: Path, model: tuple[Path, GPT2LMHeadModel], capsys: Capsys
) -> None:
    start = tmp_path / "start"
    words = (capsys, main, "--config", finetuned(tmp_path / "run", start), "--model", "tiny")
    assert f"models.tiny.finetune: {start}/config.json: no such file" in refusal(*words)
    start.mkdir()
    shutil.copyfile(model[0] / "config.json", start / "config.json")
    assert f"models.tiny.finetune: {start}: no model.safetensors" in refusal(*words)
    shutil.copytree(model[0], start, dirs_exist_ok=True)
    part = next(start.glob("model-00002-*.safetensors"))
    whole = part.read_bytes()
    part.unlink()
    assert f"{part}: no such file" in refusal(*words)
    part.write_bytes(whole[: len(whole) // 2])
    assert f"{part}: damaged" in refusal(*words)
