"""The probe on CPUs, alone and with two processes: its figures, and what it leaves behind when it fails."""

from pathlib import Path

import pytest

from common.errors import RESUME_ME
from common.files import read_json
from common.settings import ModelSettings
from tests.helpers import run_main
from tests.training.helpers import BYTE_VOCABULARY, Capsys, launch, refusal, write_config
from training.parallel.sizes import with_padded_vocabulary
from training.probe import main

MODEL = ModelSettings(n_layer=2, n_head=4, n_embd=32, seq_len=16, vocab_size=BYTE_VOCABULARY)
PARAMETERS = with_padded_vocabulary(MODEL, 1).parameters


def options(tmp_path: Path, **parallel: object) -> list[object]:
    """The probe of a tiny model without a corpus, its figures in out.json."""
    config = write_config(tmp_path, {}, parallel, {})
    return ["--config", config, "--model", "tiny", "--steps", 3, "--output", tmp_path / "out.json"]


def test_a_probe_alone_prints_and_writes_predicted_and_measured(tmp_path: Path, capsys: Capsys) -> None:
    assert run_main(main, *options(tmp_path)) == 0
    result = read_json(tmp_path / "out.json")
    measured, predicted = result["measured"], result["predicted"]
    assert measured.keys() == predicted.keys() and result["layout"]["accumulation"] == 4 and result["steps"] == 3
    assert measured["parameters"] == 4 * PARAMETERS
    assert 0 < measured["optimizer"] - 8 * PARAMETERS < 1000, "two moments, and the counts of steps"
    assert measured["tokens_per_second"] == pytest.approx(8 * 16 / measured["step_seconds"])
    parts = ("parameters", "optimizer", "transient", "context")
    assert measured["memory"] == sum(measured[part] for part in parts) and min(measured.values()) >= 0
    assert measured["context"] > 50e6, "Python and torch"
    assert "1 x cpu" in capsys.readouterr().out
    line = refusal(capsys, main, *options(tmp_path, tensor=2))  # of which there is one process
    assert "tensor 2 = 2 processes" in line and read_json(tmp_path / "out.json")["failed"] in line


def test_a_rank_that_runs_out_of_memory_is_the_result_and_one_that_dies_says_nothing(tmp_path: Path) -> None:
    results = launch(2, "tests.training.failing", *options(tmp_path, data=2), "memory")
    assert [result.returncode for result in results] == [2, 2], results
    assert "Tried to allocate 2.00 GiB." in read_json(tmp_path / "out.json")["failed"]
    (tmp_path / "out.json").unlink()
    well, dead = launch(2, "tests.training.failing", *options(tmp_path, data=2), "dies")
    assert (well.returncode, dead.returncode) == (RESUME_ME, 9)
    assert not (tmp_path / "out.json").exists()
