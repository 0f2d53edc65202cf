"""The figures of tasks are those of lm_eval, called directly."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.files import read_json
from tests.helpers import run_main
from tests.training.helpers import Capsys
from tests.training.reference import write_reference
from training.evaluate import main

tasks_of_lm_eval = pytest.importorskip("lm_eval.tasks", reason="lm_eval is not installed: pip install '.[eval]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of lm_eval and its libraries

COLOURS = [
    ("The sky is", ["blue", "a loud green"], 0),
    ("Grass is", ["red", "green"], 1),
    ("Snow is", ["white", "hot"], 0),
]
TEXTS = ["the quick brown fox jumps over the lazy dog " * 4, "eleven crows watch from an old fence of oak"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    manager = partial(tasks_of_lm_eval.TaskManager, include_defaults=False)  # to read them all takes ten seconds
    monkeypatch.setattr(tasks_of_lm_eval, "TaskManager", manager)


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], metrics: tuple[str, ...], **keys: str) -> None:
    """A task of local files: NAME.yaml, which names NAME.jsonl."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **keys}
    task["metric_list"] = [{"metric": metric} for metric in metrics]
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with a task of choices and one of perplexity."""
    questions = [{"question": text, "choices": choices, "label": label} for text, choices, label in COLOURS]
    keys = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "label"}
    write_task(tmp_path / "tasks", "colours", questions, ("acc", "acc_norm"), output_type="multiple_choice", **keys)
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    metrics = ("word_perplexity", "bits_per_byte")
    write_task(tmp_path / "tasks", "crows", [{"text": text} for text in TEXTS], metrics, **rolling)
    return tmp_path / "tasks"


def test_the_figures_are_those_of_lm_eval_called_directly(tmp_path: Path, tasks: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    write_reference(tmp_path, likely=" green")
    text, output = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text(TEXTS[0])
    asked = ("--checkpoint", tmp_path, "--tasks", "crows", "colours", "--task-dir", tasks)
    assert run_main(main, *asked, "--data", text, "--batch", "2", "--output", output) == 0
    found = read_json(output)
    rows = {(row["task"], row["metric"]): row for row in found["tasks"]}
    expected = simple_evaluate(
        model=HFLM(pretrained=str(tmp_path), device="cpu", batch_size=1),
        tasks=["colours", "crows"],
        task_manager=tasks_of_lm_eval.TaskManager(include_path=str(tasks)),
    )["results"]
    for (task, metric), row in rows.items():
        assert row["value"] == pytest.approx(expected[task][f"{metric},none"], abs=1e-4, rel=1e-4)
        error = expected[task][f"{metric}_stderr,none"]
        assert row["stderr"] == (None if error == "N/A" else pytest.approx(error, abs=1e-4, rel=1e-4))
        assert row["samples"] == len(COLOURS if task == "colours" else TEXTS)
    assert sorted(metric for _, metric in rows) == ["acc", "acc_norm", "bits_per_byte", "word_perplexity"]
    assert found["loss"] > 0 and found["bits_per_byte"] > 0, "the loss on --data stands beside them"


def test_max_samples_takes_the_first_of_each_task(tmp_path: Path, tasks: Path) -> None:
    write_reference(tmp_path)
    asked = ("--checkpoint", tmp_path, "--tasks", "colours", "--task-dir", tasks, "--max-samples", "2")
    assert run_main(main, *asked, "--output", tmp_path / "result.json") == 0
    assert {row["samples"] for row in read_json(tmp_path / "result.json")["tasks"]} == {2}


@pytest.mark.parametrize(("name", "told"), [("colors", "did you mean 'colours'?"), ("gone", "gone.jsonl")])
def test_an_unknown_task_and_missing_data_are_told_in_a_line(
    tmp_path: Path, tasks: Path, capsys: Capsys, name: str, told: str
) -> None:
    write_reference(tmp_path)
    write_task(tasks, "gone", [], ("acc",), output_type="multiple_choice")
    (tasks / "gone.jsonl").unlink()
    assert run_main(main, "--checkpoint", tmp_path, "--tasks", name, "--task-dir", tasks) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and told in error
