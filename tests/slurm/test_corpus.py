"""`snakemake --profile slurm` on real daemons: bytes and digits, dead tasks and nodes, a lost
terminal.
"""

import sys
from pathlib import Path

import pytest
import yaml

from common.files import read_json
from tests.conftest import ROOT
from tests.slurm.lab import Lab, missing
from tests.workflow import pipeline

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")]
COMMAND = (sys.executable, "-m", "snakemake", "--quiet", "host", "--profile", "slurm")


def test_all_on_slurm_has_the_bytes_and_digits_of_all_made_here(lab: Lab, tmp_path: Path, finished_run: Path) -> None:
    """With the profile as it is, on a cluster without accounting."""
    (tmp_path / "site").symlink_to(finished_run / "site")
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    pipeline.configure(tmp_path, cluster={"executor": "slurm", "cpus_per_task": 1, "corpus": {"shards_per_job": 1}})
    result = lab.run(*COMMAND, "--", "all", cwd=tmp_path, timeout=500)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    assert pipeline.corpus_bytes(tmp_path) == pipeline.corpus_bytes(finished_run)
    here, there = (folder / "results/x" for folder in (finished_run, tmp_path))
    assert read_json(there / "models/tiny/done.json") == read_json(here / "models/tiny/done.json")
    assert (there / "samples/tiny.txt").read_bytes() == (here / "samples/tiny.txt").read_bytes()
    assert not (there / "slurm").exists()


SNAKEFILE = """
from workflow import snakefile
settings = snakefile.read_settings(workflow)
SHARDS = [f"{n:04d}" for n in range(settings.shards)]
onstart:
    snakefile.prepare_run(settings)
rule all:
    default_target: True
    input: expand("results/x/a/{s}.txt", s=SHARDS)
rule a:
    output: "results/x/a/{s}.txt"
    resources: mem_mb=100, runtime=10
    shell:
        "echo {wildcards.s} >> ran; S={wildcards.s}; . ./command; echo text > {output:q}"
"""


def configure(folder: Path, command: str, shards: int, **corpus: object) -> Path:
    """Set up a run in `folder` whose shards each do `command`; returns the file that lists what
    ran.
    """
    folder.mkdir(exist_ok=True)
    (folder / "Snakefile").write_text(SNAKEFILE)
    (folder / "command").write_text(f"{command}\n")
    (folder / "urls.txt").write_text("http://site.example/\n")
    for name in ("slurm", "profiles"):
        (folder / name).symlink_to(ROOT / name)
    config = {"run": "results/x", "urls": ["urls.txt"], "shards": shards, "cluster": {"corpus": corpus}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "ran"


def test_a_node_that_dies_under_a_batch_of_twenty_costs_the_shard_that_ran(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "it's a folder, 100%"
    ran = configure(folder, "[ $S != 0013 ] || [ -e tried ] || { touch tried; sleep 100; }", 20, max_tasks=1)

    process = lab.start(*COMMAND, "--seconds-between-status-checks", "3", cwd=folder)
    lab.wait((folder / "tried").exists)
    (record,) = folder.glob("results/x/slurm/*/batch.json")
    node = lab.job(str(read_json(record)["job"]))["NodeList"]
    lab.kill_node(node)
    output, _ = process.communicate(timeout=400)
    lab.start_node(node)
    lab.wait_idle()
    assert "Error in rule" not in output, "nobody is to blame"
    assert process.returncode == 0 and not (folder / "results/x/slurm").exists(), output
    assert sorted(ran.read_text().split()) == sorted([*(f"{number:04d}" for number in range(20)), "0013"])


def test_a_node_where_nothing_starts_is_left_out_and_named_once(lab: Lab, tmp_path: Path) -> None:
    broken = '[ "$SLURMD_NODENAME" != node1 ] || exec /gone/.venv/bin/python'
    ran = configure(tmp_path, "true", 4, max_tasks=4, setup=[broken])
    quick = ("--seconds-between-status-checks", "3", "--latency-wait", "5")
    result = lab.run(*COMMAND, *quick, cwd=tmp_path)
    output = result.stdout + result.stderr
    assert result.returncode == 0 and sorted(ran.read_text().split()) == ["0000", "0001", "0002", "0003"], output
    assert output.count("[--exclude=node1]") == 1 and "/gone/.venv/bin/python: No such file or directory" in output


def test_a_full_disk_is_named_and_nothing_is_tried_again(lab: Lab, tmp_path: Path) -> None:
    ran = configure(tmp_path, "cat /dev/zero > results/x/a/all", 3, max_tasks=1)
    disk = tmp_path / "results"
    disk.mkdir()
    lab.check("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk))
    try:
        quick = ("--seconds-between-status-checks", "3", "--latency-wait", "5")
        result = lab.run(*COMMAND, *quick, "--keep-going", cwd=tmp_path)
    finally:
        lab.check("umount", "--lazy", str(disk))
    output = result.stdout + result.stderr
    assert result.returncode == 1 and sorted(ran.read_text().split()) == ["0000", "0001", "0002"], output
    assert f"No space left on device: {disk}/x/" in output and "Traceback" not in output, output
