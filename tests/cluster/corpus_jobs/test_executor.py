"""The executor slurm-batch, in Snakemake, on a Slurm that runs what it submits."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from cluster import slurm
from tests.cluster.fake_slurm import POLICY, FakeJob, FakeSlurm
from tests.conftest import ROOT
from tests.helpers import PATIENCE, wait_for
from tests.workflow import pipeline

HEAD = """
import os
from workflow import snakefile
settings = snakefile.read_settings(workflow)
onstart:
    snakefile.prepare_run(settings)
"""
# Each shard notes that it ran, then does what the file RULE.sh says.
RULE = """
rule {name}:
    input: lambda wildcards: ["{name}.in"] if wildcards.s == "0001" and os.path.exists("{name}.in") else []
    output: "results/x/{name}/{{s}}.txt"
    log: "results/x/logs/{name}/{{s}}.log"
    threads: 4
    priority: -{memory}
    resources: mem_mb={memory}, runtime=10, {more}
    shell:
        "(echo {name}.{{wildcards.s}} >> ran; R={name} S={{wildcards.s}}; . ./{name}.sh; {word}"
        " echo $OMP_NUM_THREADS > {{output:q}}) > {{log:q}} 2>&1"
"""
QUICK = """
import sys
from cluster import slurm
from cluster.corpus_jobs import dag_jobs, executor, submitter
from snakemake.cli import main
slurm.TIMEOUT = 3600
executor.POLL, submitter.RETRY, submitter.SOON, dag_jobs.IDLE = 0.05, {retry}, 0.1, 0.1
main()
"""
# The second shard of a task hangs the first time that it runs.
HANGS = "[ $S != 0001 ] || [ -e $R.tried ] || { touch $R.tried; sleep 60; }"


@dataclass
class Site:
    """The working folder with a Snakefile, its Slurm, and the output of the Snakemake that was
    started last.
    """

    fake: FakeSlurm
    rules: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, list[str]] = field(default_factory=dict)
    running: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def rule(self, name: str, command: str, shards: int = 3, more: str = "", word: str = "") -> None:
        """Add or replace a rule with a request, and so a batch, of its own."""
        Path(f"{name}.sh").write_text(f"{command}\n")
        memory = 100 + [*self.rules, name].index(name)
        self.rules[name] = RULE.format(name=name, memory=memory, more=more, word=word)
        self.outputs[name] = [f"results/x/{name}/{number:04d}.txt" for number in range(shards)]

    def start(self, *arguments: str, retry: float = 0.3, **corpus: object) -> "subprocess.Popen[bytes]":
        """Start Snakemake with all rules."""
        wanted = [path for paths in self.outputs.values() for path in paths]
        every = f"rule all:\n    default_target: True\n    input: {wanted}\n"
        Path("Snakefile").write_text("".join([HEAD, every, *self.rules.values()]))
        config = {"run": "results/x", "urls": ["none"], "cluster": {"corpus": {"max_tasks": 1, **corpus}}}
        Path("config.yaml").write_text(yaml.safe_dump(config))
        quick = ["--seconds-between-status-checks", "1", "--latency-wait", "1", "--quiet", "host", "--cores", "1"]
        command = [sys.executable, "-c", QUICK.format(retry=retry), "--profile", "slurm", *quick, *arguments]
        with open("output", "wb") as output:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        self.running.append(process)
        return process

    @property
    def output(self) -> str:
        return Path("output").read_text()

    def ran(self, rule: str) -> str:
        """The shards of a rule that ran, sorted."""
        lines = Path("ran").read_text().split() if Path("ran").exists() else []
        return " ".join(sorted(line[-1] for line in lines if line.partition(".")[0] == rule))

    def jobs(self, rule: str) -> list[FakeJob]:
        """The jobs of a rule in Slurm, oldest first."""
        return [job for job in self.fake.jobs() if job.name == f"x.{rule}"]


@pytest.fixture
def site(tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.chdir(tmp_path)
    for name in ("slurm", "profiles"):
        Path(name).symlink_to(ROOT / name)
    Path("none").touch()
    fake.runs = True
    made = Site(fake)
    yield made
    for process in made.running:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Case:
    """A rule of three shards, and what becomes of it."""

    command: str
    ran: str
    """The shards that ran."""
    attempts: str = "1"
    """The attempts for which jobs were submitted, as their memory tells."""
    state: str = ""
    """In which Slurm ends the first job, once it hangs."""
    said: str = ""
    """In the output; empty: nothing about the rule."""


FAULTS = {
    "always": Case("[ $S != 0001 ] || exit 4", "0 1 1 1 2", "1 2 3", said="exit code 4"),
    "bad_input": Case("[ $S != 0001 ] || exit 2", "0 1 2", said="exit code 2"),
    # not the first shard of its task: the time limit was not its fault; memory and crashes are
    "node": Case(HANGS, "0 1 1 2", "1 1", "NODE_FAIL"),
    "preempted": Case(HANGS, "0 1 1 2", "1 1", "PREEMPTED"),
    "later": Case(HANGS, "0 1 1 2", "1 1", "TIMEOUT"),
    "memory": Case(HANGS, "0 1 1 2", "1 1 2", "OUT_OF_MEMORY", "(OUT_OF_MEMORY) at its limit of"),
    "crash": Case(HANGS, "0 1 1 2", "1 1 2", "FAILED", "ended (FAILED)"),
    "limit": Case(
        HANGS.replace("0001", "0000"),
        "0 0 1 2",
        "1 1 2",
        "TIMEOUT",
        "at its limit of 10 minutes; raise cluster.corpus.runtime_minutes.limit",
    ),
    "resumes": Case(HANGS.replace("0001", "0000"), "0 0 1 2", "1 1", "TIMEOUT"),
    "setup": Case(
        "true", "", "1 1 1", said="(FAILED) before it started any shard, like those on node1 and node2 (and 2"
    ),
    "bad_node": Case("true", "0 1 2", "1 1"),
    "no_disk": Case(
        "[ $S != 0000 ] || { rm -r results/x/no_disk; exit 4; }",
        "0 1 2",
        said="exit code 4; No such file or directory: results/x/no_disk",
    ),
    "never": Case("true", "", said="PartitionTimeLimit"),
    "down": Case("true", "", "1", "CANCELLED", "PartitionDown"),
    "cancelled": Case(HANGS, "0 1", "1", "CANCELLED", "ended (CANCELLED): somebody cancelled it (and 1 others"),
}


def test_each_fault_repeats_what_it_must_and_says_why(site: Site) -> None:
    """A rule per fault, all in one run."""
    site.fake.names = ["node1", "node2", "node3", "node4"]
    stays = {"x.never": "PartitionTimeLimit", "x.down": "PartitionDown"}
    site.fake.behave(stays=stays)
    for name, case in FAULTS.items():
        site.rule(name, case.command, more="resumes=1" if name == "resumes" else "")
    bad = "case $SLURM_JOB_NAME.$SLURMD_NODENAME in x.setup.*|x.bad_node.node1) echo no such module; exit 1;; esac"
    process = site.start("--keep-going", setup=[bad])
    for name, case in FAULTS.items():
        if case.state and case.state != "CANCELLED":
            wait_for(lambda name=name: Path(f"{name}.tried").exists())
            site.fake.end(site.jobs(name)[0].id, case.state)
    wait_for(Path("cancelled.tried").exists)
    for silent, looks in ((True, 3), (False, 3)):
        site.fake.behave(silent=silent, stays=stays)
        before = len(site.fake.calls("squeue"))
        wait_for(lambda before=before, looks=looks: len(site.fake.calls("squeue")) >= before + looks)
    for name in ("down", "cancelled"):  # a person
        subprocess.run(["scancel", site.jobs(name)[0].id], env=slurm.environment(), check=True)
    assert process.wait() == 1
    for number, (name, case) in enumerate(FAULTS.items()):
        assert site.ran(name) == case.ran, name
        asked = [int(job.asked["mem"]) // (100 + number) for job in site.jobs(name)]
        assert " ".join(map(str, sorted(asked))) == case.attempts, name
        assert case.said in site.output and (case.said or f"Error in rule {name}:" not in site.output), site.output
    for once in ("yet: PartitionDown", "not answer; waiting for it", "squeue answers again.", "[--exclude=node1]"):
        assert site.output.count(once) == 1, site.output
    left = {path.name.partition(".")[0] for path in Path("results/x/slurm").iterdir()}
    assert left == {"never"}, "Slurm might still start it: it then finds that it was abandoned"


def test_the_only_node_is_tried_again(site: Site) -> None:
    site.rule("a", "true")
    process = site.start(setup=["[ -e tried ] || { touch tried; exit 1; }"])
    assert process.wait() == 0 and site.ran("a") == "0 1 2", site.output
    scripts = [job.asked.get("exclude") for job in site.jobs("a")]
    assert scripts == [None, None] and len(site.fake.calls("sbatch")) == 3, "without it, no node was left"


def test_the_shell_gets_exactly_the_text_of_a_local_run(site: Site) -> None:
    """And results are read while squeue hangs."""
    ended = threading.Event()
    site.fake.behave(meanwhile=lambda command: command == "squeue" and (Path("asked").touch() or ended.wait()))
    text = "until [ -e asked ]; do sleep 0.05; done; "
    text += """echo "$BASH_EXECUTION_STRING" '$HOME it'"'"'s' "$0" >> $R.$S; false | true || echo pipefail >> $R.$S"""
    site.rule("here", text, shards=1)
    site.rule("away", text, shards=1)
    site.rules["here"] += "localrules: here\n"
    assert site.start().wait(PATIENCE) == 0, site.output
    ended.set()
    here, away = (Path(f"{name}.0000").read_text() for name in ("here", "away"))
    assert away == here.replace("here", "away") and "set -euo pipefail" in away and away.endswith("pipefail\n")
    assert len(site.fake.jobs()) == 1


def test_a_refusal_stops_the_run_and_names_the_key(site: Site) -> None:
    site.fake.behave(refuses=f"QOSMaxWallDurationPerJobLimit\n{POLICY}")
    site.rule("a", "true")
    assert site.start().wait() == 1
    (line,) = (line for line in site.output.splitlines() if "QOSMaxWallDurationPerJobLimit" in line)
    assert "cluster.corpus.runtime_minutes.a" in line and "Traceback" not in site.output
    assert len(site.fake.calls("sbatch")) == 1 and not Path("results/x/slurm").exists()


def test_what_a_user_may_not_have_queued_follows_as_jobs_end(site: Site) -> None:
    site.fake.behave(most=2)
    site.rule("a", "until [ -e go ]; do sleep 0.05; done", shards=6)
    process = site.start(retry=600, shards_per_job=1, max_tasks=6)
    wait_for(lambda: "the rest follows as jobs end" in site.output)
    assert len(site.fake.batches()) == 2 < len(site.fake.calls("sbatch")) <= 8
    Path("go").touch()
    assert process.wait() == 0 and site.ran("a") == "0 1 2 3 4 5", site.output
    assert not any("_" in call[-1] for call in site.fake.calls("squeue")), "arrays are asked for as a whole"


def test_ctrl_c_cancels_the_jobs_and_the_next_run_goes_on(site: Site) -> None:
    """In the next run, a second Ctrl-C leaves at once although sbatch hangs, and nothing runs
    later.
    """
    site.rule("a", HANGS)
    first = site.start()
    wait_for(Path("a.tried").exists)
    first.send_signal(signal.SIGINT)
    assert first.wait() == 130 and site.fake.calls("scancel") == [["scancel", "1000"]], site.output
    wait_for(lambda: site.fake.job("1000").state == "CANCELLED")
    assert len([*Path("results/x/slurm").glob("a.*/0.abandoned")]) == 1, "it ends by itself if Slurm does not answer"
    site.fake.behave(holds="before")
    second = site.start()
    wait_for(lambda: len(site.fake.calls("sbatch")) == 2)
    second.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(1)
    second.send_signal(signal.SIGINT)
    assert second.wait() == 130
    site.fake.behave()
    wait_for(lambda: len(site.fake.jobs()) == 2 and site.fake.job("1001").state == "COMPLETED")
    assert site.ran("a") == "0 1"


def test_snakemake_survives_a_lost_terminal_and_failed_shards(site: Site) -> None:
    """kill -9 of a run: its successor adopts what is the same, and repeats the rest when it has
    left Slurm.
    """
    site.rule(
        "a",
        "until [ $S != 0001 ] || [ -e go ]; do sleep 0.05; done\n"
        "case $S in 000[23]) [ -e tried.$S ] || { touch tried.$S; echo no; exit 4; };; esac",
        shards=4,
    )
    Path("input.in").touch()
    site.rule("input", "until [ -e input.go ]; do sleep 0.05; done", shards=2)
    site.rule("other", "trap 'sleep 0.5; echo ended >> order; exit 1' TERM; touch trapped; sleep 60 & wait", shards=2)
    site.rule("sbatch", "true", shards=2)
    held, lost = threading.Event(), threading.Event()

    def hold(command: str) -> None:
        if command == "sbatch" and "/slurm/sbatch." in site.fake.calls()[-1][-1] and not held.is_set():
            held.set()
            lost.wait()

    site.fake.behave(meanwhile=hold)
    first = site.start()
    wait_for(lambda: held.is_set() and "1" in site.ran("a") and site.ran("input") and Path("trapped").exists())
    first.kill()
    first.wait()
    (record,) = Path("results/x/slurm").glob("a.*/batch.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "job": "4711"}))  # a number of the site's banner
    Path("input.go").touch()
    wait_for(lambda: site.jobs("input")[0].state == "COMPLETED")
    Path("input.in").write_text("newer than the second shard")
    site.rule("other", "echo again >> order", shards=2, word="true;")
    before = len(site.fake.calls("squeue"))
    second = site.start()
    wait_for(lambda: len(site.fake.calls("squeue")) >= before + 2)  # after the first one it has adopted what runs
    shards = [json.loads(path.read_text()) for path in Path("results/x/slurm").glob("a.*/0.json")]
    assert all(shard["context"] for shard in shards[0]), "other settings would be another command"
    Path("go").touch()
    assert second.wait() == 0 and "exit code 4" in site.output, site.output
    jobs = len(site.fake.jobs())
    lost.set()  # Slurm accepts the batch that nobody waits for
    wait_for(lambda: len(site.fake.jobs()) > jobs and site.fake.jobs()[-1].state in slurm.ENDED)
    assert [site.ran(name) for name in ("a", "input", "sbatch")] == ["0 1 2 2 3 3", "0 1 1", "0 1"]
    assert Path("order").read_text().split() == ["ended", "again", "again"]
    assert [words[1:] for words in site.fake.calls("scancel")] == [[site.jobs("other")[0].id]]
    array, *again = site.jobs("a")
    assert [array.asked[key] for key in ("cpus-per-task", "mem", "time")] == ["4", "100", "10"]
    assert "requeue" in array.asked and {(job.asked["mem"], job.asked["time"]) for job in again} == {("200", "10")}
    assert Path("results/x/a/0000.txt").read_text() == "4\n", "the threads of the rule, not --cores"
    kept = {path.name: path.read_text() for path in Path("results/x/logs/a").iterdir()}
    assert len(kept) == 6 and kept["0002.attempt1.log"] == kept["0003.attempt1.log"] == "no\n" and not kept["0002.log"]
    assert not Path("results/x/slurm").exists(), "a run that ended normally leaves no records"


@pytest.mark.slow  # 14 s of CPU; tests/slurm/test_corpus.py does it with Slurm's own daemons
def test_the_corpus_made_by_slurm_jobs_has_the_bytes_of_the_one_made_here(site: Site, finished_run: Path) -> None:
    Path("site").symlink_to(finished_run / "site")
    Path("profiles").unlink()  # `configure` links it
    pipeline.configure(Path.cwd(), cluster={"corpus": {"max_tasks": 2}})
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--profile",
        "slurm",
        "--seconds-between-status-checks",
        "1",
        "dataset",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert pipeline.corpus_bytes(Path.cwd()) == pipeline.corpus_bytes(finished_run)
    assert len(site.fake.batches()) < len(site.fake.jobs()) <= 25 and not Path("results/x/slurm").exists()
    assert list(Path("results/x/logs/slurm").iterdir()) == []
