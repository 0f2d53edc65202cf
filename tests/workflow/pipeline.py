"""The whole pipeline on a small site: the folder for tests of whole runs, and how to run it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import yaml

from tests.conftest import ROOT
from tests.helpers import prose, wait_for
from tests.slurm.lab.processes import alive
from workflow.demo.build import build_site

# Everything but the times in the statistics and logs must be equal between two runs.
CORPUS_FILES = (
    *("urls/*.txt", "urls/**/*.zst", "pages/**/*.zst", "clean/**/*.zst", "dedup/**/*.zst"),
    *("tokens/*.bin", "tokens/*.idx", "tokens/rejects/*.zst"),
    *("dataset/*.bin", "dataset/*.idx", "dataset/*_document.json"),
)
LINKED = ("Snakefile", "workflow", "profiles")

TINY = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 32, "dropout": 0.1},
    "parallel": {"tensor": 2},
    "train": {
        "iterations": 12, "micro_batch_size": 4, "global_batch_size": 4, "lr": 0.01, "warmup": 0.1, "split": "80,20,0",
        "log_interval": 4, "eval_interval": 4, "save_interval": 4,
    },
}  # fmt: skip


CHAPTERS = 12  # with fewer, two of the odd pages would hold the same text


def paragraphs(number: int) -> list[str]:
    """The text of a chapter of the site."""
    return [prose(100 * number + part, 83) for part in range(6)]


def configure(folder: Path, **more: object) -> None:
    """Set up a working folder: Snakefile, rules, profiles, and a configuration for `site`."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    config = {
        "run": "results/x",
        "urls": ["site/urls.txt"],
        "site": "site",
        "shards": 2,
        "scrape": {"host_delay": 0, "page_timeout": 5, "retries": 0},
        "dedup": {"jobs": 1},
        "train_models": ["tiny"],
        "models": {"tiny": TINY},
        "generate": {"prompt": "The", "max_tokens": 5},
        **more,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def build(folder: Path) -> None:
    """Set up a folder and run `python -m workflow.demo` in it; see the fixture `finished_run`."""
    chapters = {f"Chapter {number}": "\n\n".join(paragraphs(number)) for number in range(CHAPTERS)}
    build_site(chapters, folder / "site")
    configure(folder)
    (folder / "stdout").write_text(finish([sys.executable, "-m", "workflow.demo"], folder))


def start(command: Sequence[str], folder: Path, **env: str) -> "subprocess.Popen[str]":
    """Start a command in a working folder."""
    environment = {**os.environ, **env}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(command: Sequence[str], folder: Path, **env: str) -> str:
    """Run a command in a working folder to its end; returns its output and fails with it."""
    process = start(command, folder, **env)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


SNAKEMAKE = (sys.executable, "-m", "snakemake")
DATASET = (*SNAKEMAKE, "dataset", "--quiet", "host")


def snakemake(folder: Path, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run Snakemake in a working folder, whatever its exit code."""
    environment = {**os.environ, **env}
    return subprocess.run([*SNAKEMAKE, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def planned(folder: Path, *arguments: str, **env: str) -> tuple[dict[str, int], str]:
    """The jobs of each rule that Snakemake would run, and the output of the dry run."""
    result = snakemake(folder, "-n", *arguments, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    table = result.stdout.partition("Job stats:")[2].split("\n\n")[0].splitlines()[3:]
    return {row.split()[0]: int(row.split()[1]) for row in table}, result.stdout + result.stderr


def kill_tree(process: "subprocess.Popen[str]") -> None:
    """kill -9 a process and all its descendants."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    wait_for(lambda: not any(map(alive, family)))
    process.communicate()


def corpus_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of the corpus that must be equal between two runs, by its path in the run."""
    run = folder / "results" / "x"
    return {str(path.relative_to(run)): path.read_bytes() for pattern in CORPUS_FILES for path in run.glob(pattern)}
