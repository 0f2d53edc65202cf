"""The executor slurm-batch on a Slurm that runs what it submits; most tests stand for Snakemake, a few run it."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from snakemake.shell import shell
from snakemake_interface_common.exceptions import WorkflowError

from cluster import slurm
from cluster.corpus_jobs import batches, dag_jobs, executor
from cluster.corpus_jobs.dag_jobs import describe
from common.config import validate
from tests.cluster.fake_slurm import POLICY, FakeSlurm
from tests.conftest import ROOT
from tests.helpers import wait_for
from tests.workflow import pipeline

# Each shard notes that it ran, then does what the file `command` says. ONCE: it sleeps the first time that it runs.
ONCE = "[ -e tried ] || { touch tried; sleep 60; }"
SETTINGS = validate({"run": "results/x", "urls": ["none"]}, "test")
SHELL = "(echo {0} >> ran; echo attempt; SHARD={0}; . ./command; echo text > {1}) > {2} 2>&1"


@dataclass(eq=False)
class Job:
    """A Snakemake job, as the executor sees it."""

    number: int
    name: str
    shellcmd: str
    resources: dict[str, int]
    input: list[str] = field(default_factory=list)
    attempt: int = 1
    restart_times: int = 2
    said: str = ""  # about its failures
    ended: str = ""  # finished or failed
    threads = 4
    is_shell, is_local, is_shadow, is_pipe, is_service = True, False, False, False, False
    conda_env = container_img = env_modules = benchmark = None

    def __post_init__(self) -> None:
        self.rule = SimpleNamespace(name=self.name)
        self.wildcards_dict = {"shard": f"{self.number:04d}"}
        self.output = [f"results/x/{self.name}/{self.number:04d}.txt"]
        self.log = [f"results/x/logs/{self.name}/{self.number:04d}.log"]

    async def prepare(self) -> None:
        for path in (*self.output, *self.log):
            Path(path).parent.mkdir(parents=True, exist_ok=True)

    def log_error(self, said: str, **_more: Any) -> None:
        self.said += f"{said}\n"

    def is_group(self) -> bool:
        return False

    def log_info(self) -> None: ...

    def register(self, external_jobid: str) -> None: ...


class Site:
    """A working folder with a configuration and a command, its Slurm, and the Snakemakes that were started in it."""

    def __init__(self, folder: Path, fake: FakeSlurm, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.fake, self.notes = folder, fake, list[str]()
        self.error: Exception | None = None
        self._patch, self._executors = patch, list[executor.Executor]()
        fake.runs = True
        self.command("true")

    def command(self, text: str) -> None:
        (self.folder / "command").write_text(text)

    def start(self, jobs: list[Job], **corpus: object) -> executor.Executor:
        """Start a Snakemake with these jobs, of which all are ready."""
        raw = {"run": "results/x", "urls": ["none"], "cluster": {"corpus": {"max_tasks": 2, **corpus}}}
        workflow: Any = SimpleNamespace(
            scheduler=self,
            running=set(jobs),
            dag=SimpleNamespace(needrun_jobs=lambda: jobs),
            async_run=asyncio.run,
            is_main_process=True,
            executor_settings=None,
            main_snakefile="",
            global_resources={"_cores": 1},
            executor_plugin="slurm-batch",
            remote_execution_settings=SimpleNamespace(seconds_between_status_checks=0.1),
            execution_settings=SimpleNamespace(latency_wait=0.2),
        )
        self.running, self.error = workflow.running, None
        self._patch.setattr(dag_jobs, "parsed", (workflow, validate(raw, "test")))
        logger = SimpleNamespace(warning=self.notes.append, info=self.notes.append)
        self._executors.append(executor.Executor(workflow, logger))
        self._executors[-1].run_jobs(jobs)
        return self._executors[-1]

    def finish(self, jobs: list[Job]) -> None:
        wait_for(lambda: self.error or all(job.ended for job in jobs))
        self.stop()

    def run(self, jobs: list[Job], **corpus: object) -> None:
        """Run these jobs to their end."""
        self.start(jobs, **corpus)
        self.finish(jobs)

    def stop(self) -> None:
        """End the thread of each executor and nothing else, as kill -9 does."""
        for one in self._executors:
            one.shutdown()

    def ran(self) -> list[str]:
        path = self.folder / "ran"
        return sorted(path.read_text().split()) if path.exists() else []

    def submitted(self) -> int:
        return len(self.fake.calls("sbatch"))

    # what the executor calls of Snakemake's scheduler

    def submit_callback(self, job: Job) -> None: ...

    def finish_callback(self, job: Job) -> None:
        job.ended = "finished"

    def error_callback(self, job: Job) -> None:
        job.attempt += 1
        if job.attempt > job.restart_times + 1:
            job.ended = "failed"
        else:
            self._executors[-1].run_jobs([job])

    def executor_error_callback(self, error: Exception) -> None:
        self.error = error


@pytest.fixture
def site(tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(executor, "POLL", 0.02)
    monkeypatch.setattr(executor, "RETRY", 0.3)
    monkeypatch.setattr(dag_jobs, "IDLE", 0.1)
    made = Site(tmp_path, fake, monkeypatch)
    yield made
    made.stop()


def jobs_of(count: int, name: str = "a", text: str = SHELL, **resources: int) -> list[Job]:
    """One job per shard of a rule."""
    made = [Job(number, name, "", {"mem_mb": 100, "runtime": 10, **resources}) for number in range(count)]
    for job in made:
        job.shellcmd = text.format(job.wildcards_dict["shard"], job.output[0], job.log[0])
    return made


def names(*numbers: int) -> list[str]:
    return [f"{number:04d}" for number in sorted(numbers)]


def test_the_shell_gets_exactly_the_text_of_a_local_run(site: Site) -> None:
    text = """echo "$BASH_EXECUTION_STRING" '$HOME it'"'"'s' "$0"; false | true || echo pipefail"""
    (job,) = jobs_of(1, text=f"({text}) > there")
    shell(job.shellcmd)
    here = Path("there").read_bytes()
    Path("there").unlink()
    site.run([job])
    assert Path("there").read_bytes() == here and b"set -euo pipefail" in here and here.endswith(b"pipefail\n")


@pytest.mark.parametrize(("code", "times"), [(4, 3), (2, 1)])
def test_a_shard_that_always_fails_is_tried_three_times_and_bad_input_once(site: Site, code: int, times: int) -> None:
    site.command(f"if [ $SHARD = 0001 ]; then exit {code}; fi")
    jobs = jobs_of(3)
    site.run(jobs)
    assert [job.ended for job in jobs] == ["finished", "failed", "finished"]
    assert site.ran() == names(0, *[1] * times, 2)
    kept = [path.read_text() for path in Path("results/x/logs/slurm").iterdir()]
    assert "".join(kept).count(f"0001: exit code {code}") == times


@pytest.mark.parametrize(
    ("state", "blamed"),
    [("NODE_FAIL", False), ("PREEMPTED", False), ("TIMEOUT", False), ("OUT_OF_MEMORY", True), ("FAILED", True)],
)
def test_a_task_that_dies_redoes_only_the_shards_that_are_not_finished(site: Site, state: str, blamed: bool) -> None:
    """The shard was not the first one of its task, so the time limit was not its fault; memory and crashes are."""
    site.command(f"[ $SHARD != 0003 ] || {ONCE}")
    jobs = jobs_of(6)
    site.start(jobs, max_tasks=1)
    wait_for(Path("tried").exists)
    site.fake.end("1000", state)
    site.finish(jobs)
    assert site.ran() == names(0, 1, 2, 3, 3, 4, 5) and site.submitted() <= 3
    assert (jobs[3].said != "") == blamed and (jobs[3].attempt > 1) == blamed
    assert all(job.ended == "finished" and (job.said == "" or job is jobs[3]) for job in jobs)


@pytest.mark.parametrize("resumes", [0, 1])
def test_a_time_limit_names_its_key_unless_the_shard_goes_on_where_it_stopped(site: Site, resumes: int) -> None:
    site.command(ONCE)
    jobs = jobs_of(1, "a_3", resumes=resumes)
    jobs[0].restart_times = 0
    site.start(jobs)
    wait_for(Path("tried").exists)
    site.fake.end("1000", "TIMEOUT")
    site.finish(jobs)
    assert site.ran() == names(*[0] * (1 + resumes))
    assert [job.asked["time"] for job in site.fake.jobs()] == ["10"] * (1 + resumes)
    assert ("10 minutes; raise cluster.corpus.runtime_minutes.a" in jobs[0].said) == (not resumes)


def test_what_a_person_cancels_stays_cancelled(site: Site) -> None:
    site.command("sleep 60")
    jobs = jobs_of(4)
    site.start(jobs, max_tasks=1)
    wait_for(site.ran)
    subprocess.run(["scancel", "1000"], env=slurm.environment(), check=True)
    site.finish(jobs)
    assert [job.ended for job in jobs] == ["failed"] * 4 and site.submitted() == 1 and site.ran() == ["0000"]


def test_a_task_that_never_starts_a_shard_fails_with_what_it_printed(site: Site) -> None:
    jobs = jobs_of(2)
    site.run(jobs, setup=["echo no such module; exit 1"])
    assert [job.ended for job in jobs] == ["failed"] * 2 and site.submitted() == 3
    assert "no such module" in jobs[0].said + jobs[1].said


def test_a_refusal_stops_the_run_and_names_the_key(site: Site) -> None:
    site.fake.behave(refuses=f"QOSMaxWallDurationPerJobLimit\n{POLICY}")
    site.run(jobs_of(2))
    assert isinstance(site.error, WorkflowError) and "cluster.corpus.runtime_minutes.a" in str(site.error)
    assert site.submitted() == 1 and not Path("results/x/slurm").exists()


def test_a_pending_job_that_can_never_start_fails_at_once(site: Site) -> None:
    site.fake.behave(stays="PartitionTimeLimit")
    jobs = jobs_of(2)
    site.run(jobs)
    assert [job.ended for job in jobs] == ["failed"] * 2 and site.submitted() == 1
    assert "PartitionTimeLimit" in jobs[0].said and {job.state for job in site.fake.jobs()} == {"CANCELLED"}


def test_what_a_user_may_not_have_queued_follows_as_jobs_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "RETRY", 600.0)
    monkeypatch.setattr(executor, "SOON", 0.1)
    site.fake.behave(most=2)
    site.command("until [ -e go ]; do sleep 0.05; done")
    jobs = jobs_of(6)
    site.start(jobs, shards_per_job=1, max_tasks=6)
    wait_for(lambda: site.notes)
    assert "the rest follows as jobs end" in site.notes[0] and len(site.fake.batches()) == 2 < site.submitted() <= 8
    Path("go").touch()
    site.finish(jobs)
    assert {job.ended for job in jobs} == {"finished"} and site.ran() == names(*range(6))


def test_what_keeps_a_job_waiting_is_said_once(site: Site) -> None:
    site.fake.behave(stays="PartitionDown")
    running = site.start(jobs_of(4))
    wait_for(lambda: len(site.fake.calls("squeue")) >= 4)
    running.cancel()
    assert site.notes == ["Slurm does not start job 1000_0 yet: PartitionDown"]


def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_batch(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(batches, "_script", fails)
    site.run(jobs_of(2))
    assert isinstance(site.error, WorkflowError) and str(site.error).count("\n") == 0
    assert "No space left on device: " in str(site.error) and not Path("results/x/slurm").exists()


def test_a_silent_controller_is_waited_for_and_mentioned_once(site: Site) -> None:
    site.command("until [ -e go ]; do sleep 0.05; done")
    jobs = jobs_of(2)
    site.start(jobs)
    wait_for(lambda: len(site.ran()) == 2)
    for silent, looks in ((True, 4), (False, 3)):
        site.fake.behave(silent=silent)
        before = len(site.fake.calls("squeue"))
        wait_for(lambda before=before, looks=looks: len(site.fake.calls("squeue")) >= before + looks)
    Path("go").touch()
    site.finish(jobs)
    assert site.ran() == names(0, 1) and site.submitted() == 1
    assert len(site.notes) == 2, "one when it is silent, one when it answers again"
    assert {call[-1] for call in site.fake.calls("squeue")} == {"--jobs=1000"}, "one call for the whole array"


# A Snakemake that died, and the one that is started next.


def left_behind(site: Site, when: Callable[[], object], count: int = 4) -> None:
    """Start a Snakemake of jobs, and kill it as soon as something holds."""
    site.start(jobs_of(count), max_tasks=1)
    wait_for(when)
    site.stop()


def test_what_ended_meanwhile_is_not_redone_unless_an_input_or_the_settings_changed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("in.txt").write_text("old")
    for expected in (1, 2, 3):
        site.command("until [ -e go ]; do sleep 0.05; done")
        for path in ("ran", "go"):
            Path(path).unlink(missing_ok=True)
        left_behind(site, site.ran, count=2)
        job = site.fake.jobs()[-1].id
        Path("go").touch()
        wait_for(lambda job=job: site.fake.job(job).state == "COMPLETED")
        jobs = jobs_of(2)
        if expected == 2:
            jobs[1].input = ["in.txt"]
            os.utime("in.txt", (2**32, 2**32))
        if expected == 3:
            monkeypatch.setenv("URLS_TO_GPT2_SETTINGS", "others")
        site.run(jobs)
        assert site.ran() == {1: names(0, 1), 2: names(0, 1, 1), 3: names(0, 0, 1, 1)}[expected]


def test_a_job_that_does_something_else_by_now_is_cancelled_before_its_shards_run_again(site: Site) -> None:
    site.command("trap 'sleep 0.5; echo ended >> order; exit 1' TERM; touch trapped; sleep 60 & wait")
    left_behind(site, Path("trapped").exists, count=2)
    site.command("echo again >> order")
    site.run(jobs_of(2, text=SHELL.replace("echo attempt", "echo another")))
    assert Path("order").read_text().split() == ["ended", "again", "again"]


def test_a_snakemake_that_died_inside_sbatch_doubles_no_shard(site: Site) -> None:
    """Slurm accepts the batch, but nobody learns its id."""
    jobs = jobs_of(3)
    items = [describe(job, SETTINGS) for job in jobs]
    run, shards = Path("results/x"), [item.shard for item in items]
    (task,) = batches.write_batch(run, shards, [range(3)], items[0].request, SETTINGS.cluster.site_of(0))
    late = Path("late.sh")
    late.write_text((task.folder / "batch.sh").read_text())
    site.run(jobs)
    subprocess.run(["sbatch", late], env=slurm.environment(), check=True)
    wait_for(lambda: site.fake.job("1001").state == "FAILED")
    assert site.ran() == names(0, 1, 2) and site.submitted() == 2


def test_ctrl_c_cancels_the_jobs_and_the_next_run_goes_on(site: Site) -> None:
    site.command(f"[ $SHARD != 0002 ] || {ONCE}")
    running = site.start(jobs_of(4), max_tasks=1)
    wait_for(Path("tried").exists)
    running.cancel()
    assert site.fake.calls("scancel") == [["scancel", "1000"]]
    wait_for(lambda: site.fake.job("1000").state == "CANCELLED")
    site.run(jobs_of(4))
    assert site.ran() == names(0, 1, 2, 2, 3) and not Path("results/x/slurm").exists()


def test_a_second_ctrl_c_while_sbatch_hangs_leaves_at_once_and_nothing_runs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.fake.behave(holds="before")
    running = site.start(jobs_of(2), max_tasks=1)
    wait_for(site.submitted)
    with monkeypatch.context() as patch:
        patch.setattr(running, "shutdown", lambda: signal.raise_signal(signal.SIGINT))
        running.cancel()
    site.fake.behave()
    wait_for(lambda: site.fake.jobs() and site.fake.job("1000").state == "COMPLETED")
    assert site.ran() == []


# Whole runs of Snakemake.

RULES = """
from workflow import snakefile
settings = snakefile.read_settings(workflow)
onstart:
    snakefile.prepare_run(settings)
rule b:
    default_target: True
    input: expand("results/x/a/{s}.txt", s=["0000", "0001", "0002", "0003"])
    output: "results/x/b.txt"
    shell: "cat {input:q} > {output:q}"
rule a:
    output: "results/x/a/{s}.txt"
    log: "results/x/logs/a/{s}.log"
    threads: 4
    resources: mem_mb=100, runtime=10
    shell: "(echo {wildcards.s} >> ran; SHARD={wildcards.s}; . ./command; echo $OMP_NUM_THREADS > {output:q}) > {log:q}"
"""


def snakemake(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    quick = ["--seconds-between-status-checks", "1", "--latency-wait", "1", "--quiet", "host"]
    command = [sys.executable, "-m", "snakemake", "--profile", "slurm", *arguments, *quick]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def test_snakemake_survives_a_lost_terminal_and_failed_shards(site: Site) -> None:
    """Killed while the second shard runs; its successor tries the last two again, together."""
    for name in ("slurm", "profiles"):
        Path(name).symlink_to(ROOT / name)
    Path("Snakefile").write_text(RULES)
    corpus = {"corpus": {"max_tasks": 1}}
    Path("config.yaml").write_text(yaml.safe_dump({"run": "results/x", "urls": ["none"], "cluster": corpus}))
    Path("none").touch()
    site.command(
        "until [ $SHARD != 0001 ] || [ -e go ]; do sleep 0.05; done\n"
        "case $SHARD in 000[23]) [ -e tried.$SHARD ] || { touch tried.$SHARD; echo no; exit 4; };; esac"
    )
    first = snakemake(site.folder, "--cores", "1")
    wait_for(lambda: "0001" in site.ran())
    first.kill()
    first.communicate()
    second = snakemake(site.folder, "--cores", "1")
    wait_for(lambda: site.fake.calls("squeue"))
    Path("go").touch()
    output, _ = second.communicate()
    assert second.returncode == 0 and "exit code 4" in output, output
    assert site.ran() == names(0, 1, 2, 2, 3, 3) and site.submitted() == 3 and not site.fake.calls("scancel")
    assert Path("results/x/b.txt").read_text() == "4\n" * 4, "the threads of the rule, not --cores"
    array, again, _ = site.fake.batches()
    assert [array.asked[key] for key in ("cpus-per-task", "mem", "time")] == ["4", "100", "10"]
    assert array.name == again.name == "x.a" and "requeue" in array.asked
    assert (again.asked["mem"], again.asked["time"]) == ("200", "10"), "the second attempt gets more memory"
    kept = {path.name: path.read_text() for path in Path("results/x/logs/a").iterdir()}
    assert len(kept) == 6 and kept["0002.attempt1.log"] == kept["0003.attempt1.log"] == "no\n" and not kept["0002.log"]
    assert not Path("results/x/slurm").exists(), "a run that ended normally leaves no records"


@pytest.mark.slow  # 14 s of CPU; tests/slurm/test_corpus.py does it with Slurm's own daemons
def test_the_corpus_made_by_slurm_jobs_has_the_bytes_of_the_one_made_here(site: Site, finished_run: Path) -> None:
    for name in ("site", "slurm"):
        Path(name).symlink_to(finished_run / name if name == "site" else ROOT / name)
    pipeline.configure(site.folder, cluster={"corpus": {"max_tasks": 2}})
    dataset = snakemake(site.folder, "dataset")
    output, _ = dataset.communicate()
    assert dataset.returncode == 0, output
    assert pipeline.corpus_bytes(site.folder) == pipeline.corpus_bytes(finished_run)
    assert len(site.fake.batches()) < len(site.fake.jobs()) <= 25 and not Path("results/x/slurm").exists()
    assert list(Path("results/x/logs/slurm").iterdir()) == []
