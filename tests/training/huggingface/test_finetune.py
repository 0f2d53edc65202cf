"""A fine-tuned run starts with the loss of its initial model, in every layout, and only on its
first start.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from common.files import read_rows
from common.tokenizer import Tokenizer
from tests.training.helpers import (
    BYTE_VOCABULARY,
    Capsys,
    byte_documents,
    byte_vocabulary,
    launch_ok,
    make_run,
    refusal,
    settings_of,
    train_tiny,
    write_corpus,
)
from tests.training.reference import random_gpt2
from training import checkpoint
from training.huggingface.tokenizer import write_tokenizer
from training.model import initial_value
from training.planning.run import make_plan
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
    return make_run(folder, finetune=str(start), **sections)


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


def test_every_layout_starts_with_the_same_loss(tmp_path: Path, model: tuple[Path, GPT2LMHeadModel]) -> None:
    config = finetuned(tmp_path, model[0], parallel={"tensor": 2})
    launch_ok(2, "training.train", "--config", config, "--model", "tiny")
    assert_first_loss(config, model[1])


def test_a_vocabulary_that_has_all_tokens_and_more_keeps_their_embeddings(
    tmp_path: Path, model: tuple[Path, GPT2LMHeadModel], capsys: Capsys
) -> None:
    start = tmp_path / "start"
    shutil.copytree(model[0], start)
    write_tokenizer(start, Tokenizer(byte_vocabulary(tmp_path)), 24)
    config = finetuned(tmp_path / "run", start, model={"vocab_size": 259})
    write_corpus(settings_of(config).dataset_prefix, byte_documents(60), 259)
    assert "or one with all of its tokens" in refusal(capsys, main, "--config", config, "--model", "tiny")
    files = byte_vocabulary(tmp_path, "t h", "th e")
    keys = [f"tokenize.encoder_json={files.encoder_json}", f"tokenize.vocab_bpe={files.vocab_bpe}"]
    assert train_tiny(config, *keys, "train.lr=1e-30") == 0  # the weights stay as they were
    assert f"2 tokens are not in {start}" in capsys.readouterr().out
    found = checkpoint.load_weights(checkpoint.resolve(tmp_path / "run/models/tiny"))["wte.weight"]
    old = model[1].transformer.wte.weight.detach()
    new = initial_value("wte.weight", found.shape, settings_of(config).models["tiny"].model, 1234)
    assert torch.equal(found, torch.cat([old[:256], new[256:258], old[256:]]))
