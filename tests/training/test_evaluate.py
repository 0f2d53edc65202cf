"""Loss and perplexity equal a simple sum over windows; validation does not change a training."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common.files import read_json, read_rows
from convert.merge_mp import merge
from tests.conftest import Once
from tests.convert.helpers import write_pretrained
from tests.helpers import run_main
from tests.training.helpers import (
    Capsys,
    byte_documents,
    make_run,
    make_session,
    step_batches,
    train_tiny,
    write_corpus,
)
from tests.training.reference import tiny_model
from training.dataset.batches import BatchForm
from training.dataset.corpus import Corpus, Samples
from training.evaluate import main
from training.evaluation.scoring import evaluate
from training.inference.load import model_from_weights
from training.model import GPT2
from training.step import train_step, validate


def plain_loss(model: GPT2, tokens: np.ndarray) -> float:
    """The mean loss over windows that do not overlap; every token but the first counts once."""
    total, stream = torch.zeros((), dtype=torch.float64), torch.from_numpy(tokens.astype(np.int64))
    for begin in range(0, len(tokens) - 1, model.settings.seq_len):
        window = stream[begin : begin + model.settings.seq_len + 1]
        with torch.no_grad():
            total += F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum")
    return float(total) / (len(tokens) - 1)


@pytest.mark.parametrize("texts", [byte_documents(7), [np.array([5, 9, 200])]])
def test_every_token_counts_once_even_in_the_short_last_window(texts: list[np.ndarray]) -> None:
    model, texts = tiny_model(257), [text.astype(np.int64) for text in texts]
    result = evaluate(model, Samples(Corpus.in_memory(Path("c"), texts), range(len(texts)), 16))
    assert result["tokens"] == sum(map(len, texts)) - 1
    assert result["loss"] == pytest.approx(plain_loss(model, np.concatenate(texts)), rel=1e-5)
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))


def test_bytes_are_those_of_the_tokens_that_count() -> None:
    texts = [text.astype(np.int64) for text in byte_documents(3)]
    samples = Samples(Corpus.in_memory(Path("c"), texts), range(3), 16)
    found = evaluate(tiny_model(257), samples, np.ones(257, np.int64), form=BatchForm(256, eod_mask_loss=True))
    assert found["bytes"] == found["tokens"] == sum(map(len, texts)) - 3  # without the first token of each document


def test_all_tokens_of_several_datasets_have_the_same_weight(tmp_path: Path) -> None:
    model, output = tiny_model(257), tmp_path / "result.json"
    (tmp_path / "model").mkdir()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_pretrained(tmp_path / "model", weights, model.settings)
    sets = {str(tmp_path / name): byte_documents(count) for name, count in (("a", 2), ("b", 9))}
    for name, documents in sets.items():
        write_corpus(Path(name), documents)
    assert run_main(main, "--checkpoint", tmp_path / "model", "--data", *sets, "--output", output) == 0
    found = read_json(output)
    tokens = {name: np.concatenate(documents) for name, documents in sets.items()}
    losses = {name: plain_loss(model, part) for name, part in tokens.items()}
    assert {name: found["each"][name]["loss"] for name in sets} == pytest.approx(losses, rel=1e-5)
    expected = sum(losses[name] * (len(tokens[name]) - 1) for name in sets) / found["tokens"]
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert (found["tokens"], found["documents"]) == (sum(map(len, tokens.values())) - 2, 11)


def losses_of_steps(folder: Path, validates: bool = False, **train: Any) -> list[float]:
    """The losses of three steps, with dropout."""
    session = make_session(folder, train=train)
    seen = []
    steps = step_batches(session, 0)
    for iteration in (1, 2, 3):
        seen.append(train_step(session, iteration, next(steps), 0.01).loss)
        if validates:
            validate(session, session.plan.data.valid, 5)
    return seen


def test_validation_does_not_change_later_steps_and_bfloat16_is_near_float32(tmp_path: Path) -> None:
    plain = losses_of_steps(tmp_path, precision="float32")
    assert losses_of_steps(tmp_path, validates=True, precision="auto") == plain  # float32 on a CPU
    half = losses_of_steps(tmp_path, precision="bfloat16")
    assert half != plain and half == pytest.approx(plain, rel=0.01)


def test_validation_scores_the_samples_asked_for_however_they_are_batched(tmp_path: Path) -> None:
    """11 samples are not a multiple of the global batch of 8 or of the micro-batch of 4."""
    for micro in (2, 4):
        session = make_session(tmp_path / str(micro), train={"micro_batch_size": micro})
        found, settings = validate(session, session.plan.data.valid, 11), session.experiment.model
        weights = {name: value.detach() for name, value in session.parameters.items()}
        weights["wte.weight"] = weights["wte.weight"][: settings.vocab_size]
        model = model_from_weights(settings, weights)
        tokens = torch.stack([torch.from_numpy(session.plan.data.valid.sample(number)) for number in range(11)])
        expected = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        assert found == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.fixture
def trained(once: Once) -> Path:
    """The folder of a run on 40 documents with the split 80,10,10, and of its merged model."""

    def build(folder: Path) -> None:
        train = {"iterations": 1, "split": "80,10,10", "keep_best": True}
        assert train_tiny(make_run(folder, documents=40, train=train)) == 0
        merge(folder / "models" / "tiny", folder / "merged")

    return once("split-80-10-10", build)


@pytest.mark.parametrize("checkpoint", ["models/tiny/best", "merged"])
def test_a_part_follows_the_training_split_or_the_one_that_is_given(
    trained: Path, checkpoint: str, tmp_path: Path
) -> None:
    data, output = trained / "dataset/corpus_text_document", tmp_path / "result.json"
    asked = ("--checkpoint", trained / checkpoint, "--data", data, "--output", output, "--part", "valid")
    assert run_main(main, *asked) == 0
    found = read_json(output)
    assert (found["documents"], found["split"]) == (4, "80,10,10")
    inputs = [entry["path"] for entry in read_json(tmp_path / "result.run.json")["inputs"]]
    assert inputs[-2:] == [f"{data}.bin", f"{data}.idx"]
    assert run_main(main, *asked, "--split", "0.8,0.1,0.1") == 0
    assert read_json(output)["loss"] == found["loss"]
    assert run_main(main, *asked, "--batch", "1") == 0
    assert read_json(output)["loss"] == pytest.approx(found["loss"], rel=1e-5)
    # what provenance.remove leaves of the last documents: no loss is computed, and it ends no run
    write_corpus(tmp_path / "removed", [*byte_documents(32), *[np.full(99, 256)] * 8])
    for paths, documents in (([tmp_path / "removed"], None), ([data, tmp_path / "removed"], 4)):
        assert run_main(main, *asked[:2], "--data", *paths, *asked[4:]) == 0
        assert read_json(output).get("documents") == documents and ("loss" in read_json(output)) == (len(paths) > 1)


@pytest.mark.parametrize("keys", [("reset_position_ids",), ("reset_attention_mask", "eod_mask_loss"), ()])
def test_the_loss_follows_the_rules_of_the_training_before_and_after_the_merge(
    tmp_path: Path, capsys: Capsys, keys: tuple[str, ...]
) -> None:
    rules = dict.fromkeys(keys, True)
    config, data = make_run(tmp_path, train={"split": "27,33,0", "eval_batches": 99, **rules}), tmp_path / "documents"
    # 33 * 33 tokens of validation are 68 whole windows: the trainer leaves out a shorter last one
    tokens = np.random.default_rng(0).integers(0, 256, (60, 33)).astype(np.uint16)
    write_corpus(data, [np.append(row[1:], 256) for row in tokens])
    assert train_tiny(config, f"data=[{{prefix: {data}, weight: 1}}]", "train.iterations=2") == 0
    merge(tmp_path / "models/tiny", tmp_path / "merged")
    merge(tmp_path / "merged", tmp_path / "again")
    expected = float(read_rows(tmp_path / "models/tiny/valid.csv")[-1]["loss"])
    for checkpoint in ("models/tiny", "again"):
        capsys.readouterr()
        asked = ("--checkpoint", tmp_path / checkpoint, "--data", data, "--part", "valid")
        assert run_main(main, *asked, "--output", tmp_path / "result.json") == 0
        found = read_json(tmp_path / "result.json")
        assert found["loss"] == pytest.approx(expected, rel=1e-6) and rules.items() <= found.items()
        assert ("as it was trained" in capsys.readouterr().err) == bool(rules)


def test_what_tasks_need_is_told_in_a_line(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    (tmp_path / "config.json").touch()
    assert run_main(main, "--checkpoint", tmp_path, "--tasks", "hellaswag") == 2
    assert "pip install 'urls-to-gpt2[eval]'" in capsys.readouterr().err
    assert run_main(main, "--checkpoint", tmp_path / "iter_0000001", "--tasks", "hellaswag") == 2
    assert "python -m convert.merge_mp" in capsys.readouterr().err
