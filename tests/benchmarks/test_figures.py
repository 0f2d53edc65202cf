"""What the benchmarks count, and that their peers compute the same as ours."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import step
from benchmarks.extract import Score, overall, score, standard_error
from benchmarks.step_peers import plain_gpt2
from benchmarks.training_job import SIZES, Job, Size, write_dataset
from common.errors import JobError
from common.settings import ModelSettings
from training.model import GPT2

TINY = Size(ModelSettings(n_layer=2, n_head=2, n_embd=32, seq_len=16, vocab_size=256, dropout=0), 2, 1)


def test_the_score_counts_word_4_grams_with_their_repetitions() -> None:
    for gold, answer, expected in (
        ("a b c d e", "a, b.\nc-d e!", (1, 1)),  # punctuation and white space do not matter
        ("a b c d e", "A b c d e", (1 / 2, 1 / 2)),  # case matters
        ("a b c d e f", "a b c d x e f", (1 / 4, 1 / 3)),
        ("a b c d a b c d", "a b c d", (1, 1 / 5)),  # repetitions count
        ("a b", "a b c", (0, 0)),  # a text of fewer than four words is one n-gram
        ("a b c d", " \n", (None, 0)),
        ("", "a b c d", (0, None)),
    ):
        assert score(gold, answer) == Score(*expected)
    assert overall([Score(1.0, 1.0), Score(0.5, 1.0)]) == pytest.approx((2 * 0.75 / 1.75, 0.75, 1.0))
    assert overall([Score(1.0, 1.0), Score(None, 0.0)]) == pytest.approx((2 * 0.5 / 1.5, 1.0, 0.5))
    assert standard_error([Score(1.0, 1.0), Score(0.5, 0.5)] * 50) == pytest.approx(0.25 / 10, rel=0.2)


def test_the_plain_model_is_gpt2() -> None:
    torch.manual_seed(1)
    plain, whole = plain_gpt2(TINY), GPT2(TINY.model.model_copy(update={"vocab_size": TINY.rows}))
    state = plain.state_dict()
    names = {"attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    for name, target in whole.named_parameters():
        layer, _, kind = name.rpartition(".")
        for ours, theirs in names.items():
            layer = layer.replace(ours, theirs)
        value = state[f"{layer}.{kind}"]
        if layer.endswith(".qkv"):  # [(q, k, v), head, dim] -> [head, (q, k, v), dim]
            value = value.unflatten(0, (3, TINY.model.n_head, -1)).transpose(0, 1).flatten(0, 2)
        target.data.copy_(value)
    tokens, targets = torch.randint(0, 256, (2, 2, 16))
    logits, loss = plain(tokens, targets)
    torch.testing.assert_close(whole(tokens), logits)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_a_row_that_dies_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    job = Job(tmp_path, TINY)
    write_dataset(job)
    with pytest.raises(JobError, match="exit"):
        step.seconds({"dies": (sys.exit, job)}, steps=1, rounds=1)  # type: ignore[dict-item]


def test_operations_are_counted_as_published_and_ratios_are_of_rounds_side_by_side() -> None:
    assert SIZES["345m"].flop_per_token == pytest.approx(2.425e9, rel=1e-4)
    assert step.ratio([1.0, 4.0, 1.0], to=[2.0, 6.0, 1.0]) == 1.5
