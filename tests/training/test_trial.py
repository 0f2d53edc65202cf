"""A trial on CPUs, alone and with two processes: its figures, and what it leaves behind when it
fails.
"""

from pathlib import Path

import pytest

from common.config import load_settings
from common.errors import RESUME_ME, ToolkitError
from common.files import read_json
from common.settings import ModelSettings
from tests.training.helpers import BYTE_VOCABULARY, launch, write_config
from training.parallel.sizes import with_padded_vocabulary
from training.trial import run_trial

MODEL = ModelSettings(n_layer=2, n_head=4, n_embd=32, seq_len=16, vocab_size=BYTE_VOCABULARY)
PARAMETERS = with_padded_vocabulary(MODEL, 1).parameters


def test_a_trial_alone_writes_predicted_and_measured(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    run_trial(load_settings(write_config(tmp_path, {}, {}, {})), "tiny", 3, output)
    result = read_json(output)
    measured, predicted = result["measured"], result["predicted"]
    assert measured.keys() == predicted.keys() and result["layout"]["accumulation"] == 4 and result["steps"] == 3
    assert measured["parameters"] == 4 * PARAMETERS and result["device"] == "cpu"
    assert 0 < measured["optimizer"] - 8 * PARAMETERS < 1000, "two moments, and the counts of steps"
    assert measured["tokens_per_second"] == pytest.approx(8 * 16 / measured["step_seconds"])
    parts = ("parameters", "optimizer", "transient", "context")
    assert measured["memory"] == sum(measured[part] for part in parts) and min(measured.values()) >= 0
    assert measured["context"] > 50e6, "Python and torch"
    with pytest.raises(ToolkitError, match="tensor 2 = 2 processes") as error:
        run_trial(load_settings(write_config(tmp_path, {}, {"tensor": 2}, {})), "tiny", 3, output)
    assert read_json(output)["failed"] == str(error.value)


def test_a_rank_that_runs_out_of_memory_is_the_result_and_one_that_dies_says_nothing(tmp_path: Path) -> None:
    options = ("tests.training.failing", "trial", write_config(tmp_path, {}, {"data": 2}, {}), tmp_path / "out.json")
    results = launch(2, *options, "memory")
    assert [result.returncode for result in results] == [2, 2], results
    assert "Tried to allocate 2.00 GiB." in read_json(tmp_path / "out.json")["failed"]
    (tmp_path / "out.json").unlink()
    well, dead = launch(2, *options, "dies")
    assert (well.returncode, dead.returncode) == (RESUME_ME, 9)
    assert not (tmp_path / "out.json").exists()
