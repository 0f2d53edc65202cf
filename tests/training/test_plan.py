"""`python -m training.plan`: what it prints and writes, what it takes from the configuration, its one-line errors."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from common.config import load_settings, validate
from common.yaml_text import merged
from tests.training.helpers import Capsys, refusal, run_main
from training.plan import main
from training.planning.layout import Layout
from training.planning.machines import GIB

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

Plan = Callable[..., str]
Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(capsys: Capsys) -> Plan:
    """Run the command; returns what it printed."""

    def run(*words: object) -> str:
        assert run_main(main, *words) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def answer(plan: Plan) -> Answer:
    def run(*words: object) -> dict[str, Any]:
        document: dict[str, Any] = orjson.loads(plan(*words, "--json"))
        return document

    return run


@pytest.fixture
def mine(tmp_path: Path) -> tuple[object, ...]:
    """The options that choose our model of a configuration file."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return ("--config", tmp_path / "config.yaml", "--model", "mine")


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, training.plan as plan; "
        "code = plan.main(['--model', 'gpt2_345m', '--explain', '--top', '3']); "
        "sys.exit(code or 'torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_the_json_document_has_everything_and_adds_up(answer: Answer) -> None:
    found = answer("--model", "gpt2_7b", "--gpu", "a100-80g", "--gpus", "16", "--tokens", "20B", "--top", "3")
    assert set(found) == {"question", "model", "precision", "machine", "fitting", "why", "layouts"}
    assert found["model"]["parameters"] == 6_658_404_352
    assert found["fitting"] > 3 == len(found["layouts"])
    for rank, one in enumerate(found["layouts"], 1):
        assert one["rank"] == rank and one["layout"]["world_size"] == 16
        assert one["layout"]["global_batch_size"] == found["question"]["global_batch_size"] == 1024
        assert sum(one["memory_by_part"].values()) == pytest.approx(one["memory_bytes"])
        assert sum(term["value"] for term in one["terms"]["memory"]) == pytest.approx(one["memory_bytes"])
        assert sum(term["value"] for term in one["terms"]["time"]) == pytest.approx(one["step_seconds"])
        assert one["headroom_bytes"] == pytest.approx(found["machine"]["memory_bytes"] - one["memory_bytes"])
        assert one["hours"] * 3600 * one["tokens_per_second"] == pytest.approx(20e9)
        assert one["gpu_hours"] == pytest.approx(16 * one["hours"])


def test_options_fix_batch_sequence_precision_and_machine(answer: Answer) -> None:
    words = ("--model", "gpt2_345m", "--micro-batch-size", "3", "--seq-len", "2048", "--precision", "float32")
    found = answer(*words, "--max-global-batch-size", "500", "--gpu-memory", "80GiB", "--peak-tflops", "500")
    assert {one["layout"]["micro_batch_size"] for one in found["layouts"]} == {3}
    assert all(0 < one["layout"]["global_batch_size"] <= 500 for one in found["layouts"])
    assert found["model"]["seq_len"] == 2048 and found["precision"] == "float32"
    assert found["machine"]["memory_bytes"] == 80 * GIB and found["machine"]["gpu"]["bfloat16_tflops"] == 500
    smaller = answer("--model", "gpt2_124m", "--gpu", "a100-80g", "--gpu-memory", "24GB")["machine"]
    assert (smaller["memory_bytes"], smaller["gpu"]["bfloat16_tflops"]) == (24_000_000_000, 312)


def test_the_configuration_gives_model_machine_and_batch(answer: Answer, mine: tuple[object, ...]) -> None:
    found = answer(*mine)
    assert found["machine"]["name"] == "ours" and found["machine"]["gpus_per_node"] == 4
    assert found["question"]["gpus"] == 16 and found["question"]["global_batch_size"] == 2 * 8 * 4
    assert found["question"]["tokens"] == 1000 * 64 * 512
    other = answer(*mine, "model.n_layer=12", "--gpus", "8", "--gpu", "h100")
    assert (other["model"]["n_layer"], other["question"]["gpus"], other["machine"]["name"]) == (12, 8, "h100")


def test_only_the_given_layout_is_judged_and_what_would_fit_is_named(
    answer: Answer, mine: tuple[object, ...], capsys: Capsys
) -> None:
    (only,) = answer(*mine, "--given")["layouts"]
    expected = Layout.of(load_settings(Path(str(mine[1]))).experiment("mine"))
    assert {key: only["layout"][key] for key in expected._fields} == expected._asdict()
    words = ("--model", "gpt2_7b", "--given", "--gpu", "a100-40g", "parallel.data=8", "train.micro_batch_size=1")
    error = refusal(capsys, main, *words)  # 16 bytes for each of 6.66 B parameters
    assert "dp 8, batch 1 x 128 does not fit" in error and "of 39.4 GiB per GPU" in error
    cure = error.split("; ")[1].split(" would fit")[0].split()
    assert answer(*words, *cure)["layouts"][0]["verdict"] != "too large"


def test_what_is_written_replaces_the_layout_of_a_configuration(
    plan: Plan, answer: Answer, mine: tuple[object, ...], tmp_path: Path, capsys: Capsys
) -> None:
    best, page, words = tmp_path / "best.yaml", tmp_path / "plan.html", (*mine, "--gpus", "8")
    plan(*words, "--write", best, "--html", page)
    settings = validate(merged(CONFIG, yaml.safe_load(best.read_text())), "merged")  # the other layout had more keys
    chosen = answer(*words)["layouts"][0]["layout"]
    layout = Layout.of(settings.experiment("mine"))
    assert {key: chosen[key] for key in layout._fields} == layout._asdict()
    assert "<title>10: parameters" in page.read_text() and "<title>11: parameters" not in page.read_text()
    for option in ("--write", "--html"):
        assert "config.yaml" in refusal(capsys, main, *words, option, mine[1])
    assert yaml.safe_load(Path(str(mine[1])).read_text()) == CONFIG


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--model", "gpt2_345"], "'gpt2_345m'"),
        (["--model", "gpt2_345m", "--gpu", "h10"], "'h100"),
        (["--model", "gpt2_345m", "--gpus", "12"], "--gpus 8 or 16"),
        (["--model", "gpt2_345m", "--gpu-memory", "80"], "'80'"),
        (["--model", "gpt2_345m", "--tokens", "many"], "'many'"),
        (["--model", "gpt2_345m", "--peak-tflops", "0"], "--peak-tflops"),
        (["--model", "gpt2_345m", "--given", "--gpus", "4"], "--given"),
        (["--model", "gpt2_345m", "model.n_layers=3"], "models.gpt2_345m.model.n_layers"),
        (["--model", "gpt2_345m", "--gpus", "4096", "--global-batch-size", "1"], "4096 GPUs"),
        (["--model", "gpt2_124m", "--gpus", "8", "--gpu-memory", "1MiB"], "nothing fits on 8 x h100"),
        (["--global-batch-size", "8"], "--model"),
    ],
)
def test_what_cannot_be_answered_is_one_line(capsys: Capsys, words: list[str], names: str) -> None:
    assert names in refusal(capsys, main, *words)
