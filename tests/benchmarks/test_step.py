import math
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import step
from benchmarks.step import SIZES, Job, Size, Steps, plain_gpt2, seconds, write_dataset
from common.errors import JobError
from common.settings import ModelSettings, ParallelSettings
from tests.conftest import Command

TINY = Size(ModelSettings(n_layer=2, n_head=2, n_embd=32, seq_len=16, vocab_size=256, dropout=0), 2, 1)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path, TINY)
    write_dataset(made)
    return made


def test_the_plain_model_is_gpt2() -> None:
    from training.model import GPT2

    torch.manual_seed(1)
    plain, whole = plain_gpt2(TINY), GPT2(TINY.model.model_copy(update={"vocab_size": TINY.rows}))
    state = plain.state_dict()
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in whole.parameters())
    names = {"attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    for name, target in whole.named_parameters():
        layer, _, kind = name.rpartition(".")
        for ours, theirs in names.items():
            layer = layer.replace(ours, theirs)
        value = state[f"{layer}.{kind}"]
        if layer.endswith(".qkv"):  # [(q, k, v), head, dim] -> [head, (q, k, v), dim]
            value = value.unflatten(0, (3, TINY.model.n_head, -1)).transpose(0, 1).flatten(0, 2)
        with torch.no_grad():
            target.copy_(value)
    tokens, targets = torch.randint(0, 256, (2, 2, 16))
    logits, loss = plain(tokens, targets)
    torch.testing.assert_close(whole(tokens), logits)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize("row", [step.ours, step.nanogpt, step.transformers])
def test_every_row_trains_from_the_loss_of_a_guess(
    row: Callable[[Job], Steps], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_RATE", 0.01)
    threads = torch.get_num_threads()
    losses: list[Tensor] = list(islice(row(job), 20))
    torch.set_num_threads(threads)
    assert all(torch.as_tensor(loss).shape == () for loss in losses)
    assert float(losses[0]) == pytest.approx(math.log(256), rel=0.06)
    assert float(losses[-1]) < float(losses[0]) - 0.2


@pytest.mark.slow
def test_a_row_of_two_processes_runs_as_often_as_it_is_asked_to(job: Job) -> None:
    two = job._replace(parallel=ParallelSettings(data=2), micro_batches=2)
    times = seconds({"two": (step.ours, two)}, steps=2, rounds=3)
    assert len(times["two"]) == 3 and min(times["two"]) > 0


def test_a_row_that_dies_is_an_error_and_not_a_hang(job: Job) -> None:
    with pytest.raises(JobError, match="exit: a process of the benchmark ended"):
        seconds({"dies": (sys.exit, job)}, steps=1, rounds=1)  # type: ignore[dict-item]


def test_operations_are_counted_as_published() -> None:
    assert SIZES["345m"].flop_per_token == pytest.approx(2.425e9, rel=1e-4)


def test_a_ratio_is_that_of_rounds_side_by_side() -> None:
    assert step.ratio([1.0, 4.0, 1.0], to=[2.0, 6.0, 1.0]) == 1.5


@pytest.mark.slow
def test_the_benchmark_prints_every_row(command: Command) -> None:
    result = command("benchmarks.training", "step", "--size", "small", "--steps", 1, "--rounds", 1, timeout=500)
    assert result.returncode == 0, result.stderr
    for row in ("transformers", "nanoGPT-style", "ours", *step.LAYOUTS):
        assert f"| {row} " in result.stdout, row
