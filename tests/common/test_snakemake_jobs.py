"""Failed jobs of Snakemake: what becomes of results that exist, and when a job is tried again."""

import subprocess
import sys
from pathlib import Path

SNAKEFILE = """
from common import snakefile
settings = snakefile.read_settings(workflow)
rule all:
    input: "results/x/bad.txt", "results/x/again.txt"
rule bad:
    output: "results/x/bad.txt"
    retries: 3
    shell: "echo >> ran_bad; exit 2"
rule again:
    output: "results/x/again.txt"
    retries: 3
    shell: "echo >> ran_again; [ $(wc -l < ran_again) = 2 ] || exit 3; echo new > {output:q}"
"""


def test_bad_input_ends_a_job_at_once_and_leaves_the_results_that_exist(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    (tmp_path / "config.yaml").write_text("run: results/x\nurls: [urls.txt]\n")
    (tmp_path / "urls.txt").write_text("http://site.example/\n")
    results = [tmp_path / "results/x" / name for name in ("bad.txt", "again.txt")]
    results[0].parent.mkdir(parents=True)
    for result in results:
        result.write_text("old\n")
    line = [sys.executable, "-m", "snakemake", "--cores", "1", "--keep-going", "--forceall"]
    assert subprocess.run(line, cwd=tmp_path, capture_output=True, timeout=200, check=False).returncode == 1
    assert (tmp_path / "ran_bad").read_text() == "\n" and results[0].read_text() == "old\n"
    assert (tmp_path / "ran_again").read_text() == "\n\n" and results[1].read_text() == "new\n", "tried again"
    marked = (tmp_path / "results/x/records/incomplete").rglob("*")
    assert not [path for path in marked if path.is_file()], "it is as complete as before"
