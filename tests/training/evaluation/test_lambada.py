"""LAMBADA's last words, compared one by one with transformers, without batches or padding."""

import json
import math
from pathlib import Path

import pytest
import torch

from common.files import read_json
from tests.helpers import run_main
from tests.training.helpers import Capsys
from tests.training.reference import SEQ_LEN, write_reference
from training.evaluate import main

WORDS = "the quick brown dog jumps over lazy grass while eleven crows watch from an old fence of oak".split()
LAST = ("fox", "foxes", "crow")


def texts() -> list[str]:
    """Texts of 2 to 47 words, some longer than the context; their last words have one or two tokens."""
    contexts = [
        " ".join(WORDS[(number * 5 + place) % len(WORDS)] for place in range(1 + number)) for number in range(46)
    ]
    return [f"{context} {LAST[number % 3]}" for number, context in enumerate(contexts)]


def test_accuracy_and_perplexity_equal_those_of_transformers(tmp_path: Path, capsys: Capsys) -> None:
    model, tokenizer = write_reference(tmp_path, likely=" foxes")
    file, output = tmp_path / "lambada.jsonl", tmp_path / "result.json"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in texts()))
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
    assert run_main(main, "--checkpoint", tmp_path, "--task", "lambada", "--data", file, "--output", output) == 0
    found = read_json(output)
    assert (found["correct"], found["words"], found["tokens"]) == (correct, 46, scored)
    assert found["accuracy"] == pytest.approx(correct / 46)
    assert found["perplexity"] == pytest.approx(math.exp(nats / 46), rel=1e-4)
    assert f"{correct / 46:.2%} ({correct} of 46)" in capsys.readouterr().out
