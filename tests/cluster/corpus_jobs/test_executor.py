"""The executor slurm-batch: Snakemake as it is, with commands that behave like Slurm's (see running_slurm.py)."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.cluster.corpus_jobs import running_slurm
from tests.conftest import ROOT
from tests.training.helpers import wait_for

HEAD = """
from common import snakefile
settings = snakefile.read_settings(workflow)
SHARDS = [f"{n:04d}" for n in range(settings.shards)]
onstart:
    snakefile.prepare_run(settings)
"""
# Each shard of `a` notes that it ran, then does what the file `command` says; `b` needs one shard of it, `c` all.
RULES = """
rule c:
    default_target: True
    input: expand("results/x/b/{s}.txt", s=SHARDS)
    output: "results/x/c.txt"
    shell: "cat {input:q} > {output:q}"
rule a:
    output: "results/x/a/{s}.txt"
    log: "results/x/logs/a/{s}.log"
    threads: 4
    resources: mem_mb=100, runtime=10
    shell:
        "(echo {wildcards.s} >> ran; echo attempt; SHARD={wildcards.s}; . ./command; "
        "echo text > {output:q}) > {log:q} 2>&1"
rule b:
    input: "results/x/a/{s}.txt"
    output: "results/x/b/{s}.txt"
    shell: "cat {input:q} > {output:q}"
"""


class Site:
    """A working folder with a small DAG, and a fake Slurm."""

    def __init__(self, folder: Path, command: str = "true", rules: str = RULES, shards: int = 8, **corpus: object):
        self.folder, self.slurm = folder, folder / "fake"
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), **running_slurm.install(self.slurm)}
        (folder / "slurm").symlink_to(ROOT / "slurm")
        (folder / "profiles").symlink_to(ROOT / "profiles")
        (folder / "urls.txt").write_text("http://site.example/\n")
        self.configure(shards, **corpus)
        self.write(command, rules)

    def configure(self, shards: int, **corpus: object) -> None:
        cluster = {"corpus": {"max_tasks": 2, **corpus}}
        config = {"run": "results/x", "urls": ["urls.txt"], "shards": shards, "cluster": cluster}
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))

    def write(self, command: str, rules: str = RULES) -> None:
        (self.folder / "Snakefile").write_text(f"{HEAD}{rules}")
        (self.folder / "command").write_text(command)

    def start(self, *arguments: str, profile: str = "slurm") -> "subprocess.Popen[str]":
        quick = ["--seconds-between-status-checks", "1", "--latency-wait", "2"]
        chosen = ["--profile", profile] if profile else []
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", "--quiet", "host", *chosen, *quick, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, code: int = 0, profile: str = "slurm") -> str:
        process = self.start(*arguments, profile=profile)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code, output
        return output

    def submitted(self) -> int:
        return len(running_slurm.calls(self.slurm, "sbatch"))

    def ran(self) -> list[str]:
        path = self.folder / "ran"
        return sorted(path.read_text().split()) if path.exists() else []


def test_each_rule_is_one_array_and_each_shard_runs_once(tmp_path: Path) -> None:
    site = Site(tmp_path, command="sleep 0.3", shards=8)
    site.run()
    assert (tmp_path / "results/x/c.txt").read_text() == "text\n" * 8
    assert site.ran() == [f"{number:04d}" for number in range(8)]
    assert site.submitted() == 3
    first, _, last = running_slurm.batches(site.slurm)
    asked = running_slurm.options(site.slurm, first)
    assert asked["job-name"] == "x.a" and asked["array"] == "0-1" and "requeue" in asked
    assert (asked["cpus-per-task"], asked["mem"], asked["time"]) == ("4", "100", "10")
    assert "array" not in running_slurm.options(site.slurm, last), "one task is a plain job"
    renamed = running_slurm.calls(site.slurm, "scontrol")
    assert f"scontrol update jobid={first}_0 jobname=x.a.0000-0003" in renamed
    assert not (tmp_path / "results/x/slurm").exists(), "a run that ended normally leaves no records"
    assert list((tmp_path / "results/x/logs/slurm").iterdir()) == []
    assert "Nothing to be done" in site.run()


def test_the_shell_gets_exactly_the_text_of_a_local_run(tmp_path: Path) -> None:
    rules = """
rule all:
    default_target: True
    input: "results/x/it's a $HOME file.txt"
rule odd:
    output: "results/x/it's a $HOME file.txt"
    params: words=["two words", "a'b", "*"]
    threads: 2
    shell:
        '''echo "$BASH_EXECUTION_STRING" > {output:q}
        for word in {params.words:q}; do echo "$word" >> {output:q}; done
        echo $OMP_NUM_THREADS {threads} $0 >> {output:q}; false | true || echo pipefail >> {output:q}'''
"""
    texts = []
    for profile in ("", "slurm"):
        (tmp_path / f"with-{profile}").mkdir()
        site = Site(tmp_path / f"with-{profile}", rules=rules)
        site.run("--cores", "2", profile=profile)
        texts.append((site.folder / "results/x/it's a $HOME file.txt").read_text())
    here, there = texts
    assert "set -euo pipefail" in here and "two words\na'b\n*\n2 2" in here and here.endswith("pipefail\n")
    assert there == here


def test_threads_are_what_the_rule_asks_for_whatever_this_machine_has(tmp_path: Path) -> None:
    site = Site(tmp_path, command="echo $OMP_NUM_THREADS > threads.$SHARD", shards=1)
    site.run("--cores", "1")
    assert (tmp_path / "threads.0000").read_text() == "4\n"
    assert running_slurm.options(site.slurm, "1000")["cpus-per-task"] == "4"


def test_failed_shards_are_tried_again_together_and_their_logs_are_kept(tmp_path: Path) -> None:
    command = "case $SHARD in 000[1256]) [ -e tried.$SHARD ] || { touch tried.$SHARD; echo oh no; exit 4; };; esac"
    site = Site(tmp_path, command=command)
    output = site.run()
    assert site.submitted() <= 5 and site.submitted() >= 4
    assert site.ran() == sorted([f"{number:04d}" for number in range(8)] + ["0001", "0002", "0005", "0006"])
    assert "exit code 4" in output and "oh no" in output, "show-failed-logs"
    logs = tmp_path / "results/x/logs/a"
    assert "oh no" in (logs / "0001.attempt1.log").read_text()
    assert (logs / "0001.log").read_text() == "attempt\n"
    assert not (logs / "0000.attempt1.log").exists()


def test_a_shard_that_always_fails_ends_the_run_and_its_task_log_stays(tmp_path: Path) -> None:
    site = Site(tmp_path, command="if [ $SHARD = 0003 ]; then exit 4; fi")
    output = site.run(code=1)
    assert output.count("exit code 4") >= 3, "retries: 2"
    assert site.ran().count("0003") == 3 and site.ran().count("0002") == 1
    kept = [path.read_text() for path in (tmp_path / "results/x/logs/slurm").iterdir()]
    assert kept and all("0003: exit code 4" in text for text in kept)
    site.write("exit 2")
    site.run(code=1)
    assert site.ran().count("0003") == 4, "bad input is not tried again"
    site.write("true")
    site.run()
    assert site.ran().count("0002") == 1


SLOW = [pytest.param(state, marks=pytest.mark.slow) for state in ("FAILED", "PREEMPTED")]


@pytest.mark.parametrize("state", ["NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", *SLOW])
def test_a_task_that_dies_redoes_only_the_shards_that_are_not_finished(tmp_path: Path, state: str) -> None:
    site = Site(tmp_path, command="if [ $SHARD = 0003 ] && [ ! -e go ]; then sleep 60; fi", shards=20, max_tasks=1)
    process = site.start()
    wait_for(lambda: "0003" in site.ran(), timeout=60)
    (tmp_path / "go").touch()
    running_slurm.end_task(site.slurm, "1000", state)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert site.ran() == sorted([f"{number:04d}" for number in range(20)] + ["0003"])
    assert site.submitted() <= 5
    # 0003 was not the first shard of its task, so the time limit was not its fault; memory and crashes are
    assert ("Error in rule a" in output) == (state in ("OUT_OF_MEMORY", "FAILED"))


def test_a_time_limit_names_the_key_if_the_shard_had_it_for_itself(tmp_path: Path) -> None:
    site = Site(tmp_path, command="[ -e go ] || sleep 60", shards=2, max_tasks=1)
    process = site.start("--retries", "0")
    wait_for(lambda: "0000" in site.ran(), timeout=60)
    (tmp_path / "go").touch()
    running_slurm.end_task(site.slurm, "1000", "TIMEOUT")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "TIMEOUT) at its limit of 10 minutes; raise cluster.corpus.runtime_minutes.a" in output
    assert site.ran() == ["0000", "0001"]


def test_a_shard_that_resumes_goes_on_after_its_time_limit(tmp_path: Path) -> None:
    rules = RULES.replace("runtime=10", "runtime=10, resumes=1")
    site = Site(tmp_path, command="[ -e go ] || sleep 60", rules=rules, shards=1)
    process = site.start("--retries", "0")
    wait_for(lambda: site.ran(), timeout=60)
    (tmp_path / "go").touch()
    running_slurm.end_task(site.slurm, "1000", "TIMEOUT")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "Error in rule" not in output, output
    assert site.ran() == ["0000", "0000"] and running_slurm.options(site.slurm, "1001")["time"] == "10"


def test_what_a_person_cancels_stays_cancelled(tmp_path: Path) -> None:
    site = Site(tmp_path, command="sleep 60", shards=4, max_tasks=1)
    process = site.start()
    wait_for(lambda: site.ran(), timeout=60)
    subprocess.run([site.slurm / "bin" / "scancel", "1000"], check=True)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "somebody cancelled it (and 3 others of this task)" in output
    assert site.submitted() == 1


def test_a_task_that_starts_no_shard_twice_fails_with_the_reason(tmp_path: Path) -> None:
    site = Site(tmp_path, shards=4, setup=["echo no such module; exit 1"])
    output = site.run(code=1)
    assert "before it started any shard, 2 times in a row" in output and "no such module" in output
    assert site.submitted() == 2


def test_a_refusal_stops_the_run_with_one_line(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (site.slurm / "refuse").write_text(f"QOSMaxWallDurationPerJobLimit\n{running_slurm.POLICY}")
    output = site.run(code=1)
    (line,) = (line for line in output.splitlines() if "Slurm refused" in line)
    assert "a: Slurm refused the job: QOSMaxWallDurationPerJobLimit; change the time limit" in line
    assert "(cluster.corpus.runtime_minutes.a), or cluster.qos" in line
    assert "Traceback" not in output and site.submitted() == 1
    assert not (tmp_path / "results/x/slurm").exists()


@pytest.mark.slow
def test_a_refusal_that_passes_is_waited_for(tmp_path: Path) -> None:
    site = Site(tmp_path, shards=1)
    (site.slurm / "refuse").write_text(f"QOSMaxSubmitJobPerUserLimit\n{running_slurm.POLICY}")
    process = site.start()
    wait_for(lambda: site.submitted() >= 1, timeout=60)
    (site.slurm / "refuse").unlink()
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert output.count("trying again every 30 s") == 1
    assert site.submitted() == 4


def test_an_array_that_is_more_than_a_user_may_submit_is_halved(tmp_path: Path) -> None:
    site = Site(tmp_path, shards=8, max_tasks=8)
    (site.slurm / "most").write_text("4")
    output = site.run()
    first, second = (running_slurm.options(site.slurm, job) for job in running_slurm.batches(site.slurm)[:2])
    assert (first["array"], second["array"], site.submitted()) == ("0-3", "0-3", 7), "a and b: 8, 4 and 4; c: 1"
    assert "refused" not in output


def test_a_time_limit_over_that_of_the_partition_is_one_line_before_anything_is_submitted(tmp_path: Path) -> None:
    site = Site(tmp_path, command="[ -e tried ] || { touch tried; exit 1; }", shards=1)
    (site.slurm / "partitions").write_text("PartitionName=main Default=YES MaxTime=00:05:00")
    problem = "error: over MaxTime of the partition: cluster.corpus.runtime_minutes.a (10, at most 5); lower them"
    assert problem in site.run("results/x/a/0000.txt", code=2) and site.submitted() == 0
    (site.slurm / "partitions").write_text("PartitionName=main Default=YES MaxTime=01:00:00")
    site.write("[ -e tried ] || { touch tried; exit 1; }", RULES.replace("runtime=10", "runtime=60"))
    site.run()
    times = [running_slurm.options(site.slurm, job)["time"] for job in running_slurm.batches(site.slurm)]
    assert times == ["60"] * 4, "a retry has no more, either"


def test_a_pending_job_that_can_never_start_ends_the_run(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (site.slurm / "hold").write_text("PartitionTimeLimit")
    output = site.run(code=1)
    assert "job 1000_0: Slurm would never start it: PartitionTimeLimit; change the time limit" in output
    assert site.submitted() == 1 and running_slurm.calls(site.slurm, "scancel")


def test_a_silent_controller_is_waited_for_and_mentioned_once(tmp_path: Path) -> None:
    site = Site(tmp_path, command="while [ ! -e go ]; do sleep 0.1; done", shards=2)
    process = site.start()
    wait_for(lambda: site.ran(), timeout=60)
    (site.slurm / "silent").touch()
    before = len(running_slurm.calls(site.slurm, "squeue"))
    wait_for(lambda: len(running_slurm.calls(site.slurm, "squeue")) >= before + 4, timeout=60)
    (site.slurm / "silent").unlink()
    after = len(running_slurm.calls(site.slurm, "squeue"))
    wait_for(lambda: len(running_slurm.calls(site.slurm, "squeue")) >= after + 2, timeout=60)
    (tmp_path / "go").touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert output.count("does not answer") == 1 and output.count("answers again") == 1
    assert site.ran() == ["0000", "0001"]
    assert all(call.count("--jobs=") == 1 for call in running_slurm.calls(site.slurm, "squeue"))


def test_a_dry_run_prints_what_would_be_submitted_and_writes_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, shards=9, partition="big")
    output = site.run("-n")
    table = output[output.index("This run would call sbatch 3 times") :].splitlines()[2:]
    assert re.split(r"\s{2,}", table[1].strip()) == ["a", "9", "2", "5", "4", "100", "10", "big"]
    assert [line.split()[0] for line in table[1:]] == ["a", "b", "c"]
    assert not (tmp_path / "results").exists() and site.submitted() == 0
    assert "This run would call" not in site.run("-n", profile="")


def test_shards_per_job_decides_the_packing_and_makes_several_arrays_where_one_would_be_too_large(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, shards=9, shards_per_job=2, max_tasks=2, partition="cpu", partitions={"a": "web"})
    site.run()
    jobs = [running_slurm.options(site.slurm, job) for job in running_slurm.batches(site.slurm)]
    assert [job.get("array") for job in jobs if job["job-name"] == "x.a"] == ["0-1", "0-1", None]
    assert {(job["job-name"], job["partition"]) for job in jobs} == {("x.a", "web"), ("x.b", "cpu"), ("x.c", "cpu")}


def test_a_limit_on_jobs_neither_hangs_nor_starves(tmp_path: Path) -> None:
    site = Site(tmp_path, shards=5)
    site.run("--jobs", "2")
    assert site.ran() == [f"{number:04d}" for number in range(5)]


def test_jobs_find_their_programs_on_sites_that_export_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, command="python -c 'import common.settings; print(1)' > found.$SHARD", shards=1)
    script = (site.slurm / "bin" / "sbatch").read_text()
    # the daemon of the fake Slurm, and so the job, has an empty environment
    (site.slurm / "bin" / "sbatch").write_text(script.replace("exec ", "exec env -i PATH=/usr/bin:/bin "))
    site.run()
    assert (tmp_path / "found.0000").read_text() == "1\n"


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ("run:\n        pass", "rules without a shell command"),
        ("group: 'g'\n    shell: 'true'", "groups"),
        ("benchmark: 'b'\n    shell: 'true'", "benchmarks"),
    ],
)
def test_rules_that_a_task_cannot_run_are_refused_by_name(tmp_path: Path, rule: str, what: str) -> None:
    site = Site(tmp_path, rules=f"rule odd:\n    output: 'results/x/o'\n    {rule}\n")
    assert f"the executor slurm-batch cannot run {what}" in site.run("odd", code=1)
    assert site.submitted() == 0


def kill(process: "subprocess.Popen[str]", number: int) -> str:
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    return output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_lost_terminal_loses_nothing(tmp_path: Path, number: int) -> None:
    """Of four shards, two have ended, one runs and one waits when Snakemake dies; then two of them go on."""
    site = Site(tmp_path, command="while [ $SHARD = 0002 ] && [ ! -e go ]; do sleep 0.1; done", shards=4, max_tasks=1)
    process = site.start()
    wait_for(lambda: "0002" in site.ran(), timeout=60)
    kill(process, number)
    process = site.start()
    wait_for(lambda: running_slurm.calls(site.slurm, "squeue"), timeout=60)
    time.sleep(1)
    (tmp_path / "go").touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert site.ran() == [f"{number:04d}" for number in range(4)]
    assert site.submitted() == 3 and not running_slurm.calls(site.slurm, "scancel")
    assert not (tmp_path / "results/x/slurm").exists()


def test_what_ended_while_snakemake_was_dead_is_not_redone(tmp_path: Path) -> None:
    site = Site(tmp_path, command="while [ ! -e go ]; do sleep 0.1; done", shards=4, max_tasks=1)
    process = site.start()
    wait_for(lambda: site.ran(), timeout=60)
    kill(process, signal.SIGKILL)
    (tmp_path / "go").touch()
    wait_for(lambda: (site.slurm / "1000").read_text() == "COMPLETED", timeout=30)
    site.run()
    assert site.ran() == [f"{number:04d}" for number in range(4)]
    assert site.submitted() == 3


def test_a_job_that_does_something_else_by_now_is_cancelled_before_its_shards_run_again(tmp_path: Path) -> None:
    site = Site(tmp_path, command="trap 'sleep 1; echo ended >> order; exit 1' TERM; sleep 60 & wait", shards=2)
    process = site.start()
    wait_for(lambda: len(site.ran()) == 2, timeout=60)
    kill(process, signal.SIGKILL)
    site.write("echo again >> order", RULES.replace("echo attempt", "echo another"))
    site.run()
    order = (tmp_path / "order").read_text().split()
    assert order[:2] == ["ended", "ended"] and order.count("again") == 2, order
    assert running_slurm.calls(site.slurm, "scancel")
    assert not (tmp_path / "results/x/slurm").exists()


def test_an_input_that_changed_since_makes_a_shard_run_again(tmp_path: Path) -> None:
    rules = """
rule all:
    default_target: True
    input: expand("results/x/a/{s}.txt", s=SHARDS)
rule a:
    input: "in.txt"
    output: "results/x/a/{s}.txt"
    shell: "echo {wildcards.s} >> ran; while [ ! -e go ]; do sleep 0.1; done; cat {input:q} > {output:q}"
"""
    site = Site(tmp_path, rules=rules, shards=2)
    (tmp_path / "in.txt").write_text("old")
    process = site.start()
    wait_for(lambda: len(site.ran()) == 2, timeout=60)
    kill(process, signal.SIGKILL)
    (tmp_path / "go").touch()
    wait_for(lambda: (site.slurm / "1000_1").read_text() == "COMPLETED", timeout=30)
    (tmp_path / "in.txt").write_text("new")
    site.run()
    assert (tmp_path / "results/x/a/0000.txt").read_text() == "new"


def test_ctrl_c_cancels_the_jobs_and_the_next_run_goes_on(tmp_path: Path) -> None:
    site = Site(tmp_path, command="[ $SHARD != 0002 ] || [ -e go ] || sleep 60", shards=4, max_tasks=1)
    process = site.start()
    wait_for(lambda: "0002" in site.ran(), timeout=60)
    kill(process, signal.SIGINT)
    assert running_slurm.calls(site.slurm, "scancel") == ["scancel 1000"]
    wait_for(lambda: (site.slurm / "1000").read_text() == "CANCELLED", timeout=30)
    (tmp_path / "go").touch()
    site.run()
    assert site.ran() == sorted([f"{number:04d}" for number in range(4)] + ["0002"])
    assert not (tmp_path / "results/x/slurm").exists()


def test_a_snakemake_that_died_inside_sbatch_doubles_no_shard(tmp_path: Path) -> None:
    """Slurm accepts the batch, but nobody learns its id."""
    site = Site(tmp_path, shards=4, max_tasks=1)
    (site.slurm / "slow").touch()
    process = site.start()
    wait_for((site.slurm / "inside").exists, timeout=60)
    kill(process, signal.SIGKILL)
    site.run()
    (site.slurm / "inside").unlink()
    wait_for(lambda: len(running_slurm.batches(site.slurm)) == 4, timeout=30)
    time.sleep(1)
    assert site.ran() == [f"{number:04d}" for number in range(4)]
