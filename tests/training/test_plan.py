"""`python -m training.plan`: what it prints and writes, what it takes from the configuration, its
one-line errors.
"""

from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from common.config import load_settings
from tests.helpers import run_main
from tests.training.helpers import Capsys, refusal
from training.plan import main
from training.planning.layout import Layout

OURS = {"memory_gib": 47.5, "bfloat16_tflops": 300, "float32_tflops": 30}
OURS |= {"memory_gb_per_s": 900, "node_gb_per_s": 32, "network_gb_per_s": 12}
CONFIG: dict[str, Any] = {
    "run": "results/x",
    "urls": ["urls.txt"],
    "models": {
        "mine": {
            "model": {"n_layer": 24, "n_head": 16, "n_embd": 1024, "seq_len": 512},
            "parallel": {"tensor": 4, "sequence_parallel": True, "data": 4, "zero_stage": 3},
            "train": {"iterations": 1000, "micro_batch_size": 2, "accumulation": 8, "recompute": "full"},
        }
    },
    "cluster": {"gpu": "ours", "gpus_per_node": 4, "gpus": {"ours": OURS}},
}


def answer(capsys: Capsys, *words: object) -> dict[str, Any]:
    """The JSON document that the command prints."""
    assert run_main(main, *words, "--json") == 0
    document: dict[str, Any] = orjson.loads(capsys.readouterr().out)
    return document


@pytest.fixture
def mine(tmp_path: Path) -> tuple[object, ...]:
    """The options that choose our model of a configuration file."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return ("--config", tmp_path / "config.yaml", "--model", "mine")


def test_the_json_document_has_everything_and_adds_up(capsys: Capsys) -> None:
    found = answer(capsys, "--model", "gpt2_7b", "--gpu", "a100-80g", "--gpus", 16, "--tokens", "20B", "--top", 3)
    assert set(found) == {"request", "model", "precision", "machine", "fitting", "layouts"}
    assert found["model"]["parameters"] == 6_658_404_352
    assert found["fitting"] > 3 == len(found["layouts"])
    for rank, one in enumerate(found["layouts"], 1):
        assert one["rank"] == rank and one["layout"]["world_size"] == 16
        assert one["layout"]["global_batch_size"] == found["request"]["global_batch_size"] == 1024
        assert sum(one["memory_by_part"].values()) == pytest.approx(one["memory_bytes"])
        assert sum(term["value"] for term in one["terms"]["memory"]) == pytest.approx(one["memory_bytes"])
        assert sum(term["value"] for term in one["terms"]["time"]) == pytest.approx(one["step_seconds"])
        assert one["headroom_bytes"] == pytest.approx(found["machine"]["memory_bytes"] - one["memory_bytes"])
        assert one["hours"] * 3600 * one["tokens_per_second"] == pytest.approx(20e9)
        assert one["gpu_hours"] == pytest.approx(16 * one["hours"])


def test_only_the_given_layout_is_judged_and_what_would_fit_is_named(mine: tuple[object, ...], capsys: Capsys) -> None:
    (only,) = answer(capsys, *mine, "--given")["layouts"]
    expected = Layout.of(load_settings(Path(str(mine[1]))).experiment("mine"))
    assert {key: only["layout"][key] for key in expected._fields} == expected._asdict()
    words = ("--model", "gpt2_7b", "--given", "--gpu", "a100-40g", "parallel.data=8", "train.micro_batch_size=1")
    error = refusal(capsys, main, *words)  # 16 bytes for each of 6.66 B parameters
    assert "dp 8, batch 1 x 128 needs" in error and "GiB per GPU and there are 39.4" in error
    cure = error.split("; set ")[1].split(" to need")[0].split()
    assert answer(capsys, *words, *cure)["layouts"][0]["verdict"] != "too large"
    large = ("--model", "gpt2_345m", "--given", "--gpu", "a100-40g", "parallel.data=8", "train.micro_batch_size=64")
    assert "batch 64 x 1 needs" in refusal(capsys, main, *large), "the given micro-batch is judged, not a smaller one"
