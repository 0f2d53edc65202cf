"""`python -m training.plan`: what it prints and writes, what it takes from the configuration, its one-line errors."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from common import cli
from common.config import load_settings, validate
from common.yaml_text import merged
from training.plan import main
from training.planning.layout import Layout
from training.planning.machines import GIB
from training.planning.memory import PARTS

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
    "cluster": {
        "gpu": "ours",
        "gpus_per_node": 4,
        "gpus": {
            "ours": {
                "memory_gib": 47.5,
                "bfloat16_tflops": 300,
                "float32_tflops": 30,
                "memory_gb_per_s": 900,
                "node_gb_per_s": 32,
                "network_gb_per_s": 12,
            }
        },
    },
}

Plan = Callable[..., str]
Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Run the command; returns what it printed, or its error if its exit code is 2."""

    def run(*words: str, code: int = 0) -> str:
        try:
            found = cli.run(lambda: main(words))
        except SystemExit as leave:  # argparse
            found = int(leave.code or 0)
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed.err if code else printed.out

    return run


@pytest.fixture
def answer(plan: Plan) -> Answer:
    def run(*words: str) -> dict[str, Any]:
        document: dict[str, Any] = orjson.loads(plan(*words, "--json"))
        return document

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def test_the_best_ten_are_two_tables_of_at_most_120_columns(plan: Plan) -> None:
    lines = plan("--model", "gpt2_175b", "--gpus", "1024", "--gpu", "h100").splitlines()
    assert max(map(len, lines)) <= 120
    heads = [number for number, line in enumerate(lines) if "tokens/s" in line or "headroom" in line]
    assert len(heads) == 2
    for head in heads:
        assert [line.split()[0] for line in lines[head + 1 : head + 11]] == [str(rank) for rank in range(1, 11)]
        assert not lines[head + 11].strip()
    assert any(line.startswith("1: Fits") for line in lines)


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
        assert set(one["memory_by_part"]) <= set(PARTS)
        assert sum(term["value"] for term in one["terms"]["memory"]) == pytest.approx(one["memory_bytes"])
        assert sum(term["value"] for term in one["terms"]["time"]) == pytest.approx(one["step_seconds"])
        assert one["headroom_bytes"] == pytest.approx(found["machine"]["memory_bytes"] - one["memory_bytes"])
        assert one["hours"] * 3600 * one["tokens_per_second"] == pytest.approx(20e9)
        assert one["gpu_hours"] == pytest.approx(16 * one["hours"])


def test_the_same_question_gets_the_same_answer(plan: Plan) -> None:
    words = ("--model", "gpt2_774m", "--gpus", "24", "--max-global-batch-size", "500", "--explain")
    assert plan(*words) == plan(*words)


def test_a_largest_batch_is_enough_to_find_the_rest(answer: Answer) -> None:
    found = answer("--model", "gpt2_345m", "--gpus", "48", "--max-global-batch-size", "500")
    sizes = [one["layout"]["global_batch_size"] for one in found["layouts"]]
    assert all(0 < size <= 500 for size in sizes)


def test_the_cluster_may_be_named_beside_a_published_size(plan: Plan) -> None:
    assert "2 x a100-40g" in plan("--model", "gpt2_124m", "--gpus", "2", "cluster.gpu=a100-40g")


def test_options_fix_the_micro_batch_the_sequence_and_the_precision(answer: Answer) -> None:
    found = answer(
        *("--model", "gpt2_345m", "--micro-batch-size", "3", "--global-batch-size", "96"),
        *("--seq-len", "2048", "--precision", "float32"),
    )
    assert {one["layout"]["micro_batch_size"] for one in found["layouts"]} == {3}
    assert found["model"]["seq_len"] == 2048 and found["precision"] == "float32"


def test_a_gpu_may_be_described_by_its_memory_and_peak(answer: Answer) -> None:
    found = answer("--model", "gpt2_124m", "--gpu-memory", "80GiB", "--peak-tflops", "500")
    assert found["machine"]["memory_bytes"] == 80 * GIB and found["machine"]["gpu"]["bfloat16_tflops"] == 500
    smaller = answer("--model", "gpt2_124m", "--gpu", "a100-80g", "--gpu-memory", "24GB")
    assert smaller["machine"]["memory_bytes"] == 24_000_000_000
    assert smaller["machine"]["gpu"]["bfloat16_tflops"] == 312


def test_the_configuration_gives_model_machine_and_batch(answer: Answer, config: Path) -> None:
    found = answer("--config", str(config), "--model", "mine")
    assert found["machine"]["name"] == "ours" and found["machine"]["gpus_per_node"] == 4
    assert found["question"]["gpus"] == 16 and found["question"]["global_batch_size"] == 2 * 8 * 4
    assert found["question"]["tokens"] == 1000 * 64 * 512
    other = answer("--config", str(config), "--model", "mine", "model.n_layer=12", "--gpus", "8", "--gpu", "h100")
    assert (other["model"]["n_layer"], other["question"]["gpus"], other["machine"]["name"]) == (12, 8, "h100")


def test_a_kind_of_gpu_that_nobody_named_is_called_an_assumption(plan: Plan, config: Path) -> None:
    assert "8 x h100" in plan("--model", "gpt2_345m") and "(assumed: --gpu names" in plan("--model", "gpt2_345m")
    assert "assumed" not in plan("--model", "gpt2_345m", "--gpu", "h100")
    assert "assumed" not in plan("--config", str(config), "--model", "mine")


def test_speeds_are_not_predicted_on_cpus_and_marked_where_nothing_was_compared(plan: Plan, answer: Answer) -> None:
    speeds = [
        ("cpu", 2, "not predicted"),
        ("v100-32g", 8, "uncalibrated"),
        ("h100", 1, "uncalibrated"),
        ("h100", 8, ""),
    ]
    for kind, gpus, mark in speeds:
        words = ("--model", "gpt2_124m", "--gpu", kind, "--gpus", str(gpus), "--precision", "float32", "--top", "1")
        assert f"speed  {mark}" * bool(mark) in (printed := plan(*words)) and ("speed " in printed) == bool(mark)
    layout = answer("--model", "gpt2_124m", "--gpu", "cpu", "--gpus", "2", "--precision", "float32")["layouts"][0]
    assert {layout[key] for key in ("step_seconds", "tokens_per_second", "mfu", "hours", "gpu_hours")} == {None}


def test_only_the_given_layout_is_judged(answer: Answer, plan: Plan, config: Path) -> None:
    found = answer("--config", str(config), "--model", "mine", "--given")
    (only,) = found["layouts"]
    expected = Layout.of(load_settings(config).experiment("mine"))
    assert {key: only["layout"][key] for key in expected._fields} == expected._asdict()
    assert "1: Feasible." in plan("--config", str(config), "--model", "mine", "--given")


def test_a_given_layout_that_does_not_fit_is_an_error_that_names_the_nearest(plan: Plan, answer: Answer) -> None:
    words = ("--model", "gpt2_7b", "--given", "--gpu", "a100-40g", "parallel.data=8", "train.micro_batch_size=1")
    error = plan(*words, code=2)  # 16 bytes for each of 6.66 B parameters
    assert error.startswith("error: gpt2_7b: the layout dp 8, batch 1 x 128 does not fit: it takes ")
    assert "of 39.4 GiB per GPU (the largest term: " in error and error.count("\n") == 1
    cure = error.split("; ")[1].split(" would fit")[0].split()
    assert answer(*words, *cure)["layouts"][0]["verdict"] != "too large"


def test_what_is_written_replaces_the_layout_of_a_configuration(plan: Plan, answer: Answer, config: Path) -> None:
    best = config.with_name("best.yaml")
    words = ("--config", str(config), "--model", "mine", "--gpus", "8")
    plan(*words, "--write", str(best))
    keys = yaml.safe_load(best.read_text())
    settings = validate(merged(CONFIG, keys), "merged")  # the other layout had tensor, ZeRO, recompute, accumulation
    chosen = answer(*words)["layouts"][0]["layout"]
    layout = Layout.of(settings.experiment("mine"))
    assert {key: chosen[key] for key in layout._fields} == layout._asdict()
    assert layout.apply(settings.experiment("mine")).parallel == settings.experiment("mine").parallel


def test_an_input_is_never_overwritten(plan: Plan, config: Path) -> None:
    before = config.read_text()
    for option in ("--write", "--html"):
        assert "would overwrite the input" in plan(
            "--config", str(config), "--model", "mine", option, str(config), code=2
        )
    assert config.read_text() == before


def test_every_term_is_explained_with_its_formula_and_the_values_of_its_symbols(plan: Plan, answer: Answer) -> None:
    words = ("--model", "gpt2_7b", "--gpus", "64")
    text = plan(*words, "--explain")
    best = answer(*words)["layouts"][0]
    for term in (*best["terms"]["memory"], *best["terms"]["time"]):
        if not term["value"]:
            continue
        assert term["name"] in text and term["formula"] in text
        assert not term["source"] or term["source"] in text
    assert "6,658,404,352  parameters of the model" in text and "Published estimates of the memory" in text
    assert set(best["symbols"]["all"]) >= set("PLhsVtpdbmuqk") and set(best["symbols"]["time"]) >= set("lnRFW")


def test_the_page_has_the_ten_best(plan: Plan, tmp_path: Path) -> None:
    plan("--model", "gpt2_345m", "--gpu", "a100-40g", "--html", str(tmp_path / "plan.html"))
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<h1>gpt2_345m on 8 x a100-40g</h1>" in page and page.count("<svg") == 2
    assert "<title>10: parameters" in page and "<title>11: parameters" not in page


def test_the_kinds_of_gpus_are_listed_with_those_of_the_configuration(plan: Plan, config: Path) -> None:
    assert "\nh100 " in plan("--list-gpus") and "\nours " not in plan("--list-gpus")
    line = next(line for line in plan("--list-gpus", "--config", str(config)).splitlines() if line.startswith("ours"))
    assert line.split() == ["ours", "47.5", "300", "300", "30", "900", "32", "12", "8"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "gpt2_345"], "did you mean 'gpt2_345m'?"),
        (["--model", "gpt2_345m", "--gpu", "h10"], "did you mean 'h100"),
        (["--model", "gpt2_345m", "--gpus", "12"], "12 GPUs are no whole nodes of 8; give --gpus 8 or 16"),
        (
            ["--model", "gpt2_345m", "--given", "parallel.data=12", "train.global_batch_size=48"],
            "nodes of 8; give another --gpus-per-node",
        ),
        (["--model", "gpt2_345m", "--gpu-memory", "80"], "'80' must be a number with its unit"),
        (["--model", "gpt2_345m", "--tokens", "many"], "'many' must be a number of tokens"),
        (["--model", "gpt2_345m", "--peak-tflops", "0"], "must be above 0"),
        (["--model", "gpt2_345m", "--given", "--gpus", "4"], "--given takes GPUs and batch from the configuration"),
        (["--model", "gpt2_345m", "model.n_layers=3"], "unknown key 'models.gpt2_345m.model.n_layers'"),
        (["--model", "gpt2_345m", "--gpus", "4096", "--global-batch-size", "1"], "4096 GPUs takes 1 samples per step"),
        (
            ["--model", "gpt2_124m", "--gpus", "8", "--gpu-memory", "1MiB"],
            "nothing fits on 8 x h100: even ",
        ),
        (["--model", "gpt2_124m", "--gpus", "8", "--gpu-memory", "1MiB"], "more GPUs would not help"),
        (["--global-batch-size", "8"], "required: --model"),
    ],
)
def test_what_cannot_be_answered_is_one_line(plan: Plan, words: list[str], says: str) -> None:
    error = plan(*words, code=2)
    assert says in error and error.count("\n") == 1
