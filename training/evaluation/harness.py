"""Published tasks (LAMBADA, HellaSwag, …) by EleutherAI's lm-evaluation-harness, `lm_eval`.

The figures are lm_eval's own: it loads the folder with `transformers`, its tasks with `datasets`.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from common.console import is_quiet, text_table
from common.errors import InputError
from common.settings import closest


def find_tasks(tasks: Sequence[str], folder: Path | None = None) -> Any:
    """The TaskManager of all tasks that lm_eval knows and of the YAML files in `folder`.

    Raises InputError if lm_eval is not installed, or does not know one of `tasks` (or patterns).
    """
    if is_quiet():
        os.environ["TQDM_DISABLE"] = "1"
    try:
        import lm_eval.models.huggingface  # noqa: F401  # needs accelerate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError(f"tasks need lm_eval ({error}): pip install 'urls-to-gpt2[eval]'") from None
    if folder:  # alone first: to read lm_eval's 14,000 tasks takes ten seconds
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        if set(tasks) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=str(folder) if folder else None)
    for task in tasks:
        if not manager.match_tasks([task]):
            hint = closest(task, manager.all_tasks) or "; --task-dir names a folder with YAML files of more"
            raise InputError(f"{task}: no task of lm_eval{hint}")
    return manager


def run_tasks(
    checkpoint: Path, tasks: Sequence[str], manager: Any, batch_size: int, max_samples: int | None = None
) -> dict[str, Any]:
    """Print and return lm_eval's figures of a Hugging Face folder, by task and metric.

    `max_samples`: the first samples of each task, all without it. Raises InputError if a task's
    data cannot be read.
    """
    from lm_eval import __version__, simple_evaluate

    try:
        outcome = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(checkpoint.resolve())},  # a relative one is looked up on the hub, too
            tasks=manager.match_tasks(list(tasks)),
            task_manager=manager,
            batch_size=batch_size,
            limit=max_samples,
            device="cuda" if torch.cuda.is_available() else "cpu",
            log_samples=False,
        )
    except OSError as error:
        raise InputError(
            f"{' '.join(tasks)}: {error}; offline, run tasks of local files: --task-dir, evaluate.task_dir"
        ) from None
    rows = list(_rows(outcome["results"]))
    cells = [[f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row.values()] for row in rows]
    print(text_table([("task", "metric", "value", "standard error", "samples"), *cells], "llrrr"))
    return {"tasks": rows, "lm_eval": __version__}


def _rows(results: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of a table from `{task: {"metric,filter": value, "metric_stderr,filter": …}}`."""
    for task, figures in results.items():
        for key, value in figures.items():
            metric, comma, kind = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                name, error = metric if kind == "none" else f"{metric} ({kind})", figures.get(f"{metric}_stderr,{kind}")
                error = float(error) if error not in (None, "N/A") else None  # some metrics have none
                samples = figures["sample_len"]
                yield {"task": task, "metric": name, "value": float(value), "stderr": error, "samples": samples}
