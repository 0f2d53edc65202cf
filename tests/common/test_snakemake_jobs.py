"""Failed jobs of Snakemake: what becomes of results that exist, and when a job is tried again."""

import subprocess
import sys
from pathlib import Path

import yaml

SNAKEFILE = """
from common import snakefile
settings = snakefile.read_settings(workflow)
rule a:
    output: "results/x/a.txt"
    retries: 3
    params: settings.clean.min_characters
    shell: "echo >> ran; . ./command; echo {params} > {output:q}"
"""


def snakemake(folder: Path, characters: int, command: str) -> None:
    """A run with a setting on which the result depends, and a command that the job calls first."""
    config = {"run": "results/x", "urls": ["urls.txt"], "clean": {"min_characters": characters}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "command").write_text(command)
    line = [sys.executable, "-m", "snakemake", "--cores", "1", "--rerun-incomplete"]
    subprocess.run(line, cwd=folder, capture_output=True, timeout=200, check=False)


def test_bad_input_ends_a_job_at_once_and_leaves_the_results_that_exist(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    (tmp_path / "urls.txt").write_text("http://site.example/\n")
    result, ran = tmp_path / "results/x/a.txt", tmp_path / "ran"
    snakemake(tmp_path, 5, "true")
    assert result.read_text() == "5\n"
    snakemake(tmp_path, 6, "exit 2")
    assert len(ran.read_text()) == 2 and result.read_text() == "5\n"
    marked = (tmp_path / "results/x/records/incomplete").rglob("*")
    assert not [path for path in marked if path.is_file()], "it is as complete as before"
    snakemake(tmp_path, 6, "[ $(wc -l < ran) = 4 ] || exit 3")
    assert len(ran.read_text()) == 4 and result.read_text() == "6\n", "another failure is tried again"
