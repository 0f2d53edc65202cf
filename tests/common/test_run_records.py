"""Records in the run: what Snakemake plans in a copy of it."""

import base64
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

SNAKEFILE = """
from common import snakefile
settings = snakefile.read_settings(workflow)
RUN = settings.run
onstart:
    snakefile.prepare_run(settings)
rule all:
    input: RUN / "b.txt", RUN / "changed.txt", RUN / "unknown.txt"
rule b:
    input: RUN / "a.txt"
    output: RUN / "b.txt"
    shell: "cp {input:q} {output:q}"
rule a:
    output: RUN / "a.txt"
    params: f"{RUN}/other.txt"
    shell: "head -c 200000 /dev/zero > {output:q}"
rule changed:
    output: RUN / "changed.txt"
    params: settings.clean.min_characters
    shell: "touch {output:q}"
rule unknown:
    output: RUN / "unknown.txt"
    shell: "touch {output:q}"
"""


def snakemake(folder: Path, run: str, characters: int, *arguments: str) -> set[str]:
    """The rules that Snakemake runs or plans, with a run's name and a setting on which `changed` depends."""
    config = {"run": run, "urls": ["urls.txt"], "clean": {"min_characters": characters}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    line = [sys.executable, "-m", "snakemake", "--cores", "1", *arguments]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"^(?:local)?rule (\w+):", done.stdout + done.stderr, re.MULTILINE)) - {"all"}


def test_a_copied_run_is_planned_by_what_it_was_made_with(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    (tmp_path / "urls.txt").write_text("http://site.example/\n")
    assert snakemake(tmp_path, "results/x", 5) == {"a", "b", "changed", "unknown"}
    shutil.rmtree(tmp_path / ".snakemake")
    copy = tmp_path / "results" / "y"
    shutil.copytree(tmp_path / "results/x", copy)
    os.utime(copy / "b.txt", (1, 1))  # as if it was copied before a.txt
    (copy / "records/metadata" / base64.urlsafe_b64encode(b"unknown.txt").decode()).unlink()
    assert snakemake(tmp_path, "results/y", 6, "-n") == {"changed", "unknown"}
