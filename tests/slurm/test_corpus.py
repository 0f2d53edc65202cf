"""`snakemake --profile slurm dataset` on real daemons: bytes, dead tasks, a silent controller, a lost terminal."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from common.files import read_json
from demo.build import build_site
from tests.conftest import ROOT
from tests.helpers import prose
from tests.slurm.lab import Lab, missing
from tests.workflow.test_run import configure, corpus_bytes, run

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")

COMMAND = (sys.executable, "-m", "snakemake", "--quiet", "host", "--profile", "slurm")
QUICK = ("--seconds-between-status-checks", "3")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on this machine."""
    folder = tmp_path_factory.mktemp("here")
    build_site(
        {f"Chapter {n}": "\n\n".join(prose(10 * n + p, 83) for p in range(6)) for n in range(12)}, folder / "site"
    )
    configure(folder, shards=3)
    run(folder)
    return folder


def lay_out(folder: Path, here: Path, **cluster: object) -> Path:
    """The same run, to be made on Slurm."""
    (folder / "site").symlink_to(here / "site")
    (folder / "slurm").symlink_to(ROOT / "slurm")
    configure(folder, shards=3, cluster={"corpus": {"max_tasks": 2}, **cluster})
    return folder


def start(lab: Lab, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return lab.start(*COMMAND, *QUICK, *arguments, cwd=folder)


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    output, _ = process.communicate(timeout=400)
    assert process.returncode == code, output
    return output


def test_the_corpus_made_on_slurm_has_the_bytes_of_the_one_made_here(lab: Lab, tmp_path: Path, here: Path) -> None:
    """With the profile as it is, on a cluster without accounting."""
    there = lay_out(tmp_path, here)
    finish(lab.start(*COMMAND, "dataset", cwd=there))
    assert corpus_bytes(there) == corpus_bytes(here)
    assert not (there / "results/x/slurm").exists()


def test_a_wrong_partition_is_one_clear_line(lab: Lab, tmp_path: Path, here: Path) -> None:
    there = lay_out(tmp_path, here, partition="nope")
    output = finish(start(lab, there, "dataset"), code=1)
    lines = [line.strip() for line in output.splitlines() if "Slurm refused" in line]
    assert lines == [
        "blacklist: Slurm refused the job: invalid partition specified: nope; change cluster.partition"
    ] or (len(lines) == 1 and "partition" in lines[0]), output
    assert "Traceback" not in output


SHARDS = """
rule all:
    default_target: True
    input: expand("results/x/a/{s}.txt", s=SHARDS)
rule a:
    output: "results/x/a/{s}.txt"
    log: "results/x/logs/a/{s}.log"
    resources: mem_mb=100, runtime=RUNTIME
    shell: "(echo {wildcards.s} >> ran; SHARD={wildcards.s}; . ./command; echo text > {output:q}) > {log:q} 2>&1"
"""
HEAD = """
from common import snakefile
settings = snakefile.read_settings(workflow)
SHARDS = [f"{n:04d}" for n in range(settings.shards)]
onstart:
    snakefile.prepare_run(settings)
"""


def lay_out_shards(folder: Path, command: str, shards: int = 20, runtime: int = 10, **cluster: object) -> Path:
    """A small DAG of shards that take no time, except where `command` says so."""
    (folder / "Snakefile").write_text(HEAD + SHARDS.replace("RUNTIME", str(runtime)))
    (folder / "command").write_text(command)
    (folder / "urls.txt").write_text("http://site.example/\n")
    for name in ("slurm", "profiles"):
        (folder / name).symlink_to(ROOT / name)
    corpus = {"corpus": {"max_tasks": 1}, **cluster}
    config = {"run": "results/x", "urls": ["urls.txt"], "shards": shards, "cluster": corpus}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def ran(folder: Path) -> list[str]:
    path = folder / "ran"
    return sorted(path.read_text().split()) if path.exists() else []


def names(count: int) -> list[str]:
    return [f"{number:04d}" for number in range(count)]


def wait_for_shard(lab: Lab, folder: Path, name: str) -> str:
    """Wait until a shard runs; returns its job id."""
    lab.wait(lambda: name in ran(folder), timeout=100)
    (record,) = folder.glob("results/x/slurm/*/batch.json")
    return str(read_json(record)["job"])


def test_a_task_killed_in_a_batch_of_twenty_redoes_one_shard(lab: Lab, tmp_path: Path) -> None:
    folder = lay_out_shards(tmp_path, "[ $SHARD != 0013 ] || [ -e go ] || sleep 100")
    process = start(lab, folder)
    wait_for_shard(lab, folder, "0013")
    assert "x.a.0000-0019" in lab.check("squeue", "--noheader", "--format=%j")
    (folder / "go").touch()
    for runner in psutil.process_iter(["cmdline"]):
        if f"{folder}/results/x/slurm" in " ".join(runner.info["cmdline"] or []):
            runner.kill()
    finish(process)
    assert ran(folder) == sorted([*names(20), "0013"])


@pytest.mark.slow
def test_a_dead_node_costs_one_shard(lab: Lab, tmp_path: Path) -> None:
    folder = lay_out_shards(tmp_path, "[ $SHARD != 0003 ] || [ -e go ] || sleep 100", shards=6)
    process = start(lab, folder)
    job = wait_for_shard(lab, folder, "0003")
    node = lab.job(job)["NodeList"]
    (folder / "go").touch()
    lab.kill_node(node)
    try:
        output = finish(process)
    finally:
        lab.start_node(node)
        lab.wait_idle()
    assert ran(folder) == sorted([*names(6), "0003"])
    assert "Error in rule" not in output, "nobody is to blame"


@pytest.mark.slow
def test_a_time_limit_costs_no_finished_shard(lab: Lab, tmp_path: Path) -> None:
    folder = lay_out_shards(tmp_path, "[ $SHARD != 0003 ] || [ -e go ] || { touch go; sleep 200; }", 6, runtime=1)
    output = finish(start(lab, folder))
    assert ran(folder) == sorted([*names(6), "0003"])
    assert "Error in rule" not in output, "the first three shards had used up a part of the minute"


def test_snakemake_killed_and_started_again_adopts_its_jobs(lab: Lab, tmp_path: Path) -> None:
    folder = lay_out_shards(tmp_path, "while [ $SHARD = 0002 ] && [ ! -e go ]; do sleep 0.2; done", shards=4)
    process = start(lab, folder)
    job = wait_for_shard(lab, folder, "0002")
    for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        member.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    process = start(lab, folder)
    time.sleep(5)
    (folder / "go").touch()
    finish(process)
    assert ran(folder) == names(4)
    assert not (folder / "results/x/slurm").exists()
    assert lab.job(job)["JobState"] in ("COMPLETED", "COMPLETING")


def test_ctrl_c_leaves_no_job(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "it's a folder, 100%").mkdir()
    folder = lay_out_shards(tmp_path / "it's a folder, 100%", "[ -e go ] || sleep 100", shards=4)
    process = start(lab, folder)
    job = wait_for_shard(lab, folder, "0000")
    for member in psutil.Process(process.pid).children(recursive=True) or [psutil.Process(process.pid)]:
        member.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    lab.wait_job(job, "CANCELLED")
    (folder / "go").touch()
    finish(start(lab, folder))
    assert ran(folder) == sorted([*names(4), "0000"])


@pytest.mark.slow
def test_a_controller_that_is_away_for_a_minute_stops_neither_shards_nor_snakemake(lab: Lab, tmp_path: Path) -> None:
    folder = lay_out_shards(tmp_path, "while [ $SHARD = 0001 ] && [ ! -e go ]; do sleep 0.2; done", shards=4)
    process = start(lab, folder)
    lab.wait_saved(wait_for_shard(lab, folder, "0001"))
    lab.stop_controller()
    try:
        time.sleep(60)
        assert process.poll() is None
        (folder / "go").touch()
        output = finish(process)  # results are files: the end needs no controller
    finally:
        lab.start_controller()
    assert ran(folder) == names(4)
    assert output.count("controller does not answer") == 1
