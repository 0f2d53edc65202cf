"""LAMBADA's last words, compared one by one with transformers, without batches or padding."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.training.helpers import run_main
from tests.training.reference import SEQ_LEN, Reference, write_reference
from training.evaluate import main

WORDS = "the quick brown dog jumps over lazy grass while eleven crows watch from an old fence of oak".split()
LAST = ("fox", "foxes", "crow")


def texts() -> list[str]:
    """Texts of 2 to 47 words, some longer than the context; their last words have one or two tokens."""
    contexts = [
        " ".join(WORDS[(number * 5 + place) % len(WORDS)] for place in range(1 + number)) for number in range(46)
    ]
    return [f"{context} {LAST[number % 3]}" for number, context in enumerate(contexts)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return write_reference(tmp_path_factory.mktemp("model"), likely=" foxes")


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def test_accuracy_and_perplexity_equal_those_of_transformers(
    reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model, tokenizer = reference
    file, output = tmp_path / "lambada.jsonl", tmp_path / "result.json"
    write_lines(file, texts())
    right, first_right, nats, scored = [], 0, 0.0, 0
    for text in texts():
        context, word = text.rsplit(" ", 1)
        answer = tokenizer(" " + word)["input_ids"]
        tokens = (tokenizer(context)["input_ids"] + answer)[-SEQ_LEN - 1 :]
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]])).logits[0, -len(answer) :]
        nats -= float(logits.log_softmax(-1)[range(len(answer)), answer].sum())
        right.append((logits.argmax(-1).tolist() == answer, len(answer)))
        first_right += int(logits[0].argmax()) == answer[0]
        scored += len(answer)
    correct = sum(is_right for is_right, _ in right)
    assert {(True, 1), (True, 2), (False, 1), (False, 2)} == set(right), "all four cases occur"
    assert correct < first_right, "some words have only their first token right"
    assert run_main(main, "--checkpoint", folder, "--task", "lambada", "--data", file, "--output", output) == 0
    found = json.loads(output.read_text())
    assert (found["correct"], found["words"], found["tokens"]) == (correct, 46, scored)
    assert found["accuracy"] == pytest.approx(correct / 46)
    assert found["perplexity"] == pytest.approx(math.exp(nats / 46), rel=1e-4)
    figures = f"accuracy {correct / 46:.2%} ({correct} of 46), perplexity {found['perplexity']:.2f} per word"
    assert capsys.readouterr().out == f"{file}: last-word {figures}\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": ""}', "an empty text; the last word needs others before"),
        ('{"text": " lonely \\n"}', "one word; the last word needs others before"),
        ('{"words": "a b"}', "no string under 'text'"),
        ('["a b"]', "no string under 'text'"),
        ("a b", "not JSON"),
        ('{"text": "an ' + "xq" * 40 + '"}', "the last word has 80 tokens, more than the model's context of 24"),
    ],
)
def test_a_line_without_a_last_word_to_predict_is_named(
    reference: Reference, tmp_path: Path, line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "all well here"}\n' + line + "\n")
    assert run_main(main, "--checkpoint", reference.folder, "--task", "lambada", "--data", tmp_path / "bad.jsonl") == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'bad.jsonl'}:2: {says}" in error and error.count("\n") == 1


def test_a_file_without_texts_is_refused(
    reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.jsonl").write_text("")
    assert run_main(main, "--checkpoint", reference.folder, "--task", "lambada", "--data", tmp_path / "none.jsonl") == 2
    assert "none.jsonl: no texts" in capsys.readouterr().err
