"""The probe on CPUs, alone and with two processes: its figures, and what it leaves behind when it fails."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.settings import ModelSettings
from tests.helpers import assert_one_line_error
from tests.training.helpers import BYTE_VOCABULARY, Finished, launch, launch_ok, run_main, write_config
from training.leaving import RESUME_ME
from training.parallel.vocabulary import with_padded_vocabulary
from training.planning.flops import flops_per_token
from training.probe import RandomTokens, main

MODEL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "seq_len": 16, "vocab_size": BYTE_VOCABULARY}
PARAMETERS = with_padded_vocabulary(ModelSettings(**MODEL), 1).parameters


def options(tmp_path: Path, **parallel: int) -> list[object]:
    """The probe of a tiny model without a corpus, its figures in out.json."""
    config = write_config(tmp_path, {}, parallel, {})
    return ["--config", config, "--model", "tiny", "--steps", 3, "--output", tmp_path / "out.json"]


def found(tmp_path: Path) -> dict[str, Any]:
    """What out.json says."""
    result: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return result


def test_a_probe_alone_prints_and_writes_predicted_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(main, *options(tmp_path)) == 0
    result = found(tmp_path)
    measured, predicted = result["measured"], result["predicted"]
    assert measured.keys() == predicted.keys() and result["layout"]["accumulation"] == 4 and result["steps"] == 3
    assert measured["parameters"] == 4 * PARAMETERS
    assert 0 < measured["optimizer"] - 8 * PARAMETERS < 1000, "two moments, and the counts of steps"
    assert measured["tokens_per_second"] == pytest.approx(8 * 16 / measured["step_seconds"])
    parts = ("parameters", "optimizer", "transient", "context")
    assert measured["memory"] == sum(measured[part] for part in parts) and min(measured.values()) >= 0
    assert measured["context"] > 50e6, "Python and torch"
    assert result["versions"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "probe: tiny in 3 steps on 1 x cpu: batch 2 x 4\n" in printed
    assert all(word in printed for word in ("predicted", "tokens/s", "MFU", "memory of the fullest process"))
    assert printed.splitlines()[-1].startswith("no GPU: the goals") and not (tmp_path / "dataset").exists()


def test_two_processes_share_the_parameters_and_rank_0_speaks(tmp_path: Path) -> None:
    first, second = launch_ok(2, "training.probe", *options(tmp_path, data=2, zero_stage=3))
    assert second.stdout == "" and "2 x cpu: dp 2, ZeRO 3, batch 2 x 2" in first.stdout
    measured = found(tmp_path)["measured"]
    assert measured["parameters"] == pytest.approx(2 * PARAMETERS, rel=0.01)
    model = flops_per_token(ModelSettings(**MODEL))
    peak = measured["tokens_per_second"] * model / measured["mfu"] / 2
    assert 1e8 < peak < 1e13, "FLOP/s of a process"


def test_a_rank_that_runs_out_of_memory_is_the_result(tmp_path: Path) -> None:
    results = launch(2, "tests.training.failing", *options(tmp_path, data=2), "memory")
    assert all(result.returncode == 2 for result in results), results
    assert "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.)" in found(tmp_path)["failed"]


def test_a_rank_that_dies_says_nothing_about_the_layout(tmp_path: Path) -> None:
    well, dead = launch(2, "tests.training.failing", *options(tmp_path, data=2), "dies")
    assert (well.returncode, dead.returncode) == (RESUME_ME, 9)
    assert not (tmp_path / "out.json").exists()


def test_a_wrong_number_of_processes_is_one_line_and_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_main(main, *options(tmp_path, tensor=2))
    failed = found(tmp_path)["failed"]
    assert "tensor 2 = 2 processes, but 1 were started" in failed
    result = Finished(code, "", capsys.readouterr().err)
    assert_one_line_error(result, failed)  # type: ignore[arg-type]


def test_two_processes_take_a_layout_that_the_planner_chooses(tmp_path: Path) -> None:
    config = write_config(tmp_path, {}, {"auto": True}, {"micro_batch_size": 0})
    output = tmp_path / "out.json"
    first, _ = launch_ok(2, "training.probe", "--config", config, "--model", "tiny", "--output", output)
    assert "chosen by the planner" in first.stderr
    layout = found(tmp_path)["layout"]
    assert layout["pipeline"] * layout["data"] * layout["tensor"] == 2


def test_random_tokens_are_of_the_vocabulary_and_repeatable() -> None:
    tokens = RandomTokens(seq_len=1000, vocab_size=5)
    assert tokens.sample(1).shape == (1001,) and {*tokens.sample(1)} == {*range(5)} and tokens.end_of_text == 4
    assert (tokens.sample(3) == tokens.sample(3)).all() and (tokens.sample(3) != tokens.sample(4)).any()
