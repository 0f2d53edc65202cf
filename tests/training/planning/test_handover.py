"""The planner's command line becomes that of the command which measures."""

import pytest

from common.errors import InputError
from training.planning.handover import autotune_command, probe_command

QUESTION = "--config c.yaml --model tiny --gpus 8 --autotune 3 --global-batch-size 64 --write best.yaml train.lr=1"


def test_a_probe_gets_the_layout_and_no_machine() -> None:
    argv = "--config c.yaml --model tiny --given --probe --seq-len 512 --precision=float32 parallel.tensor=2".split()
    expected = "training.probe --config c.yaml --model tiny model.seq_len=512 train.precision=float32 parallel.tensor=2"
    assert probe_command(argv) == expected.split()
    with pytest.raises(InputError, match="--gpu"):
        probe_command([*argv, "--gpu", "h100"])


def test_autotune_gets_the_question() -> None:
    expected = "cluster.autotune --config c.yaml --model tiny --gpus 8 --top 3 --global-batch-size 64"
    assert autotune_command(QUESTION.split()) == [*expected.split(), "--write", "best.yaml", "train.lr=1"]
    assert autotune_command(["--autotune=3", "--max-global-batch-size=9"])[1:] == [
        *("--top", "3", "--max-global-batch-size", "9"),
    ]
    for option in ("--gpu-memory", "--given", "--html"):
        with pytest.raises(InputError, match=option):
            autotune_command([*QUESTION.split(), option])
