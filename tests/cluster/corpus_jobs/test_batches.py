import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.corpus_jobs import batches
from cluster.corpus_jobs.batches import Request, Shard, accepted, context, recorded, remove, split, write_batch
from common.console import QUIET
from common.settings import SiteSettings
from snakemake_scheduler_plugin_in_order import Scheduler
from tests.conftest import ROOT
from tests.workflow.pipeline import configure


@given(count=st.integers(1, 500), per_task=st.integers(0, 50), max_tasks=st.integers(1, 60))
def test_every_shard_is_in_one_task_and_no_array_is_too_large(count: int, per_task: int, max_tasks: int) -> None:
    arrays = split(count, per_task, max_tasks)
    assert [number for array in arrays for task in array for number in task] == list(range(count))
    assert all(1 <= len(array) <= max_tasks and min(map(len, array)) >= 1 for array in arrays)
    if per_task:
        assert max(len(task) for array in arrays for task in array) <= per_task
        assert len(arrays) == -(-count // (per_task * max_tasks)), "no more arrays than it takes"
    else:
        assert len(arrays) == 1


def test_a_whole_run_takes_at_most_twenty_calls(tmp_path: Path) -> None:
    """As the dry run counts them; the number of shards changes the tasks, not the calls."""
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    (tmp_path / "urls.txt").write_text("http://site.example/\n")
    (tmp_path / "evaluation.txt").write_text('["a text to keep out of the corpus"]')
    configure(
        tmp_path,
        urls=["urls.txt"],
        site=None,
        scrape={"contact": "me@site.example"},
        shards=60,
        dedup={"jobs": 8},
        decontaminate={"files": ["evaluation.txt"]},
        cluster={
            "executor": "slurm",
            "gpus_per_node": 2,
            "partition": "gpu",
            "corpus": {"partition": "cpu", "max_tasks": 40},
        },
    )
    command = [sys.executable, "-m", "snakemake", "-n", "--quiet", "rules", "--profile", "slurm", "all"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("This run would call sbatch ") :].splitlines()
    assert int(table[0].split()[5]) == len(table) - 3 <= 20, done.stdout
    rows = {line.split()[0]: line.split()[1:] for line in table[3:]}
    assert rows["scrape"][:3] == ["60", "30", "2"] and rows["dedup_bands"][:2] == ["8", "8"], rows
    assert (rows["merge"][-1], rows["evaluate"][-1]) == ("cpu", "gpu"), "the model is evaluated where it was trained"
    assert not (tmp_path / "results").exists()


def shard(number: int) -> Shard:
    return Shard(f"key{number}", f"{number:04d}", "clean", "true", "/bin/bash", 1, [])


def test_a_batch_is_found_again_with_what_its_results_say(tmp_path: Path) -> None:
    shards = [shard(number) for number in range(5)]
    run = tmp_path / "a run, 100%"
    tasks = write_batch(run, shards, [range(3), range(3, 5)], Request(2, 500, None), SiteSettings(partition="p q"))
    script = (tasks[0].folder / "batch.sh").read_text()
    assert "#SBATCH --array=0-1\n" in script and "#SBATCH '--partition=p q'\n" in script and "--time" not in script
    assert f"/a run, 100%%/logs/slurm/{tasks[0].folder.name}_%a.log" in script
    assert tasks[0].folder.stat().st_mode == run.stat().st_mode, "others of the group may continue the run"
    assert [task.job for task in recorded(run)] == ["", ""], "not submitted, as far as we know"
    accepted(tasks, "77")
    end = {"end": 0, "exit": 0, "seconds": 1, "max_rss_mb": 1}
    events = [{"begin": 0, "job": "77_0"}, {"start": 0, "time": 5.0}, end, {"start": 1, "time": 6.0}]
    (tasks[0].folder / "0.results").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"end": 1, ')
    first, second = recorded(run)
    assert (first.job, second.job, first.shards) == ("77_0", "77_1", shards[:3])
    assert first.running == 1 and not first.alone and list(first.ended) == [0] and first.started[1] == 6.0
    with open(first.folder / "0.results", "a") as file:
        file.write('\n{"begin": 1, "job": "77_0"}\n{"start": 1, "time": 7.0}\n')
    first.read()
    assert first.running == 1 and first.alone, "after a requeue it has the time limit for itself"
    accepted([first, second], "4711")
    assert [task.job for task in recorded(run)] == ["77_0", "77_1"], "sbatch printed another number than its own id"
    remove(first.folder)
    assert not (run / "slurm").exists()


def test_nodes_that_are_left_out_join_those_that_the_site_excludes(tmp_path: Path) -> None:
    site = SiteSettings(sbatch=["--exclude=node[7-8]", "--mail-type=END"])
    (task,) = write_batch(tmp_path, [shard(0)], [range(1)], Request(1, 1, 1), site, {"node1": None, "node2": None})
    *_, last = re.findall(r"^#SBATCH '?(--exclude=[^'\n]*)", (task.folder / "batch.sh").read_text(), re.MULTILINE)
    assert last == "--exclude=node[7-8],node1,node2", "sbatch takes the last of several"


def test_a_full_disk_names_the_batch_and_leaves_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(batches, "_script", fails)
    with pytest.raises(OSError, match=r"No space left on device: \S+/slurm/clean\."):
        write_batch(tmp_path, [shard(0)], [range(1)], Request(1, 1, 1), SiteSettings())
    assert not (tmp_path / "slurm").exists()


def test_other_settings_or_another_python_are_another_context_but_not_other_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = context({"URLS_TO_GPT2_SETTINGS": "a", "HOME": "/root"})
    assert first == context({"URLS_TO_GPT2_SETTINGS": "a", QUIET: "1"}) != context({"URLS_TO_GPT2_SETTINGS": "b"})
    monkeypatch.setattr(sys, "executable", "/other/bin/python")
    assert first != context({"URLS_TO_GPT2_SETTINGS": "a"})


def test_the_scheduler_takes_what_fits_in_the_order_of_priorities() -> None:
    jobs = [SimpleNamespace(priority=0, jobid=n, scheduler_resources={"_cores": 1, "_nodes": 1}) for n in range(10)]
    jobs[7].priority = 1
    scheduler = Scheduler(None, None, None)
    assert [job.jobid for job in scheduler.select_jobs(jobs, jobs, {"_cores": 3, "_nodes": 10**9}, {})] == [7, 0, 1]


def test_a_batch_that_snakemake_removes_while_it_is_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [path / "gone/batch.json", *glob(path, pattern)])
    assert list(recorded(tmp_path)) == []
