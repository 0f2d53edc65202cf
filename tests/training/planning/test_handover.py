"""The planner's command line becomes that of the command which measures."""

from importlib import import_module

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


def test_every_option_of_a_handed_over_command_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parsed(Exception):
        pass

    def parsed(_arguments: object) -> None:
        raise Parsed

    monkeypatch.setattr("common.cli.read_settings", parsed)
    asked = "--config c.yaml --model tiny --seq-len 8 --precision float32 model.n_layer=1".split()
    batch = "--global-batch-size 8 --micro-batch-size 2".split()
    machine = "--gpus 2 --gpu h100 --write best.yaml".split()
    for command in (probe_command([*asked, *batch, "--probe"]), autotune_command([*asked, *batch, *machine])):
        with pytest.raises(Parsed):
            import_module(command[0]).main(command[1:])
