"""A fine-tuned run starts with the loss of its initial model, in every layout, and only on its first start."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

from common.errors import ConfigError
from common.files import read_rows, write_json
from common.tokenizer import Tokenizer
from common.tokenizer_json import to_json
from tests.training.helpers import (
    BYTE_VOCABULARY,
    byte_documents,
    launch_ok,
    make_run,
    run_main,
    settings_of,
    write_corpus,
)
from training.inference.load import load_model
from training.run_plan import make_plan
from training.train import main

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 24, "vocab_size": BYTE_VOCABULARY}
TRAIN = {"iterations": 1, "lr": 1e-9, "min_lr": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GPT2LMHeadModel]:
    """A GPT-2 far from its initial values, and its folder as transformers writes it, with several weight files."""
    config = GPT2Config(**SIZES, attn_pdrop=0.3, bos_token_id=256, eos_token_id=256)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = GPT2LMHeadModel(config).eval()
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.1))
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder, model


def finetuned(folder: Path, start: Path, **sections: Any) -> Path:
    """A configuration whose model starts from `start`, with 16 of its 24 positions."""
    sections = {"train": TRAIN, **sections, "model": {"dropout": 0.0, **sections.get("model", {})}}
    config = make_run(folder, **sections)
    raw = yaml.safe_load(config.read_text())
    raw["models"]["tiny"]["finetune"] = str(start)
    config.write_text(yaml.safe_dump(raw))
    return config


def first_loss(config: Path) -> float:
    return float(read_rows(settings_of(config).model_folder("tiny") / "train.csv")[0]["lm_loss"])


def loss_of_transformers(model: GPT2LMHeadModel, config: Path) -> float:
    """The loss on the run's first global batch."""
    samples = make_plan(settings_of(config), "tiny").data.train
    tokens = torch.stack([torch.from_numpy(samples.sample(number)) for number in range(8)])
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def test_the_first_loss_is_the_initial_models_and_a_resumed_run_does_not_need_its_folder(
    tmp_path: Path, model: tuple[Path, GPT2LMHeadModel], capsys: pytest.CaptureFixture[str]
) -> None:
    start = tmp_path / "start"
    shutil.copytree(model[0], start)
    config = finetuned(tmp_path / "run", start)
    assert run_main(main, "--config", config, "--model", "tiny") == 0
    assert f"weights of {start}\n" in capsys.readouterr().out
    expected = loss_of_transformers(model[1], config)
    assert first_loss(config) == pytest.approx(expected, rel=1e-5)
    shutil.rmtree(start)
    assert run_main(main, "--config", config, "--model", "tiny", "train.iterations=2") == 0
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
    assert first_loss(config) == pytest.approx(loss_of_transformers(model[1], config), rel=1e-5)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"n_layer": 3}, r"models\.tiny\.model\.n_layer is 3, but .*/config\.json has 2; set it to 2"),
        ({"n_head": 2}, r"models\.tiny\.model\.n_head is 2, but .* has 4"),
        ({"n_embd": 64}, r"models\.tiny\.model\.n_embd is 64, but .* has 32"),
        ({"seq_len": 25}, r"models\.tiny\.model\.seq_len is 25, but .* has 24 positions; that many or fewer"),
    ],
)
def test_another_architecture_is_refused_by_key_before_anything_is_computed(
    tmp_path: Path, model: tuple[Path, GPT2LMHeadModel], section: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_plan(settings_of(finetuned(tmp_path, model[0], model=section)), "tiny")


def test_a_folder_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = GPT2Config(**{**SIZES, "vocab_size": 300}, bos_token_id=256, eos_token_id=256)
    GPT2LMHeadModel(other).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"vocab_size is 257, but .* has 300"):
        make_plan(settings_of(finetuned(tmp_path, tmp_path / "other")), "tiny")


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_padding_rows_of_a_foreign_model_are_left_out_with_a_note_in_the_plan(tmp_path: Path, size: int) -> None:
    """320 rows are 257 rounded up to a multiple of 64, as 50,304 are 50,257."""
    config = GPT2Config(**{**SIZES, "vocab_size": 320}, bos_token_id=256, eos_token_id=256)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        theirs = GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "padded")
    run = finetuned(tmp_path / "run", tmp_path / "padded", parallel={"tensor": size})
    assert "; 63 of 320 embedding rows are padding and left out\n" in str(make_plan(settings_of(run), "tiny"))
    if size == 1:
        assert run_main(main, "--config", run, "--model", "tiny") == 0
    else:
        launch_ok(size, "training.train", "--config", run, "--model", "tiny")
    trimmed = torch.nn.Linear(32, 257, bias=False)
    trimmed.weight = torch.nn.Parameter(theirs.transformer.wte.weight[:257].detach())
    theirs.lm_head = trimmed
    assert first_loss(run) == pytest.approx(loss_of_transformers(theirs, run), rel=1e-5)


def test_a_folders_tokenizer_decides_how_many_rows_are_tokens(tmp_path: Path) -> None:
    """Following one message never leads to its opposite: the data decide vocab_size."""
    padded = GPT2Config(**{**SIZES, "vocab_size": 50304}, bos_token_id=50256, eos_token_id=50256)
    theirs = GPT2LMHeadModel(padded).eval()
    theirs.save_pretrained(tmp_path / "padded")
    write_json(tmp_path / "padded" / "tokenizer.json", to_json(Tokenizer().vocabulary))
    config = finetuned(tmp_path / "run", tmp_path / "padded", model={"vocab_size": 50257})
    write_corpus(settings_of(config).dataset_prefix, byte_documents(60), 50257)
    assert "; 47 of 50,304 embedding rows are padding and left out" in str(make_plan(settings_of(config), "tiny"))
    ours, tokenizer = load_model(tmp_path / "padded")
    assert tokenizer is not None and ours.settings.vocab_size == tokenizer.vocab_size == 50257
    tokens = torch.randint(50257, (2, 16), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits[..., :50257]
    found = ours(tokens).cpu()
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    (settings_of(config).dataset_prefix.with_suffix(".json")).unlink()
    other = finetuned(tmp_path / "other", tmp_path / "padded", model={"vocab_size": 50304})
    write_corpus(settings_of(other).dataset_prefix, byte_documents(60), 50304)
    with pytest.raises(ConfigError, match=r"vocab_size is 50304, but .* has 50257 tokens; set it to 50257 if the data"):
        make_plan(settings_of(other), "tiny")


def test_a_missing_or_incomplete_folder_gives_one_line(
    tmp_path: Path, model: tuple[Path, GPT2LMHeadModel], capsys: pytest.CaptureFixture[str]
) -> None:
    start = tmp_path / "start"
    config = finetuned(tmp_path / "run", start)

    def says() -> str:
        assert run_main(main, "--config", config, "--model", "tiny") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert f"models.tiny.finetune: {start}/config.json: no such file" in says()
    start.mkdir()
    shutil.copyfile(model[0] / "config.json", start / "config.json")
    assert f"models.tiny.finetune: {start}: no model.safetensors" in says()
    shutil.copytree(model[0], start, dirs_exist_ok=True)
    part = next(start.glob("model-00002-*.safetensors"))
    whole = part.read_bytes()
    part.unlink()
    assert f"{part}: no such file, but model.safetensors.index.json names it" in says()
    part.write_bytes(whole[: len(whole) // 2])
    assert f"{part}: damaged" in says()
