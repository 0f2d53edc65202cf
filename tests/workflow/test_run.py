"""Whole runs of the corpus steps on small sites: their results, which a kill -9 must not change."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml

from common.tokenizer import Tokenizer
from corpus.index import IndexedDataset
from demo.build import build_site
from report.funnel import funnel
from tests.conftest import ROOT
from tests.helpers import prose, read_shard

# Everything but the times in the statistics and logs must be equal between two runs.
CORPUS_FILES = (
    *("urls/*.txt", "urls/**/*.zst", "pages/**/*.zst", "clean/**/*.zst", "dedup/**/*.zst"),
    *("tokens/*.bin", "tokens/*.idx", "tokens/rejects/*.zst"),
    *("dataset/*.bin", "dataset/*.idx", "dataset/*_document.json"),
)

MADE_FROM_PAGES = ("clean", "dedup", "tokens", "dataset")
LINKED = ("Snakefile", "workflow", "profiles")


def configure(folder: Path, **more: object) -> None:
    """Set up a working folder: our Snakefile, rules and profiles, and a configuration for the site in `site`."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    config = {
        "run": "results/x",
        "urls": ["site/urls.txt"],
        "site": "site",
        "shards": 2,
        "scrape": {"host_delay": 0, "page_timeout": 2, "retries": 0},
        "dedup": {"jobs": 1},
        **more,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def start(folder: Path, *arguments: str, inside: Sequence[str] = (), **env: str) -> "subprocess.Popen[str]":
    """Start the corpus steps; `inside` is a command that runs Snakemake's."""
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "snakemake", "dataset", "--quiet", "host", *arguments],
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, *arguments: str, inside: Sequence[str] = (), **env: str) -> str:
    """Run the corpus steps to the end; see `start`."""
    process = start(folder, *arguments, inside=inside, **env)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return output


def kill_tree(process: "subprocess.Popen[str]") -> None:
    """kill -9 a process and all its descendants."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)
    process.communicate(timeout=10)


def corpus_bytes(folder: Path) -> dict[str, bytes]:
    run_folder = folder / "results" / "x"
    return {
        str(path.relative_to(run_folder)): path.read_bytes()
        for pattern in CORPUS_FILES
        for path in run_folder.glob(pattern)
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a site whose texts are not the demo's."""
    folder = tmp_path_factory.mktemp("finished")
    chapters = {f"Chapter {number}": "\n\n".join(prose(100 * number + p, 83) for p in range(6)) for number in range(24)}
    build_site(chapters, folder / "site")
    configure(folder)
    run(folder)
    return folder


def test_another_site_gives_another_corpus(finished: Path) -> None:
    dataset = IndexedDataset(finished / "results/x/dataset/corpus_text_document")
    dataset.verify()
    assert dataset.n_documents >= 24
    text = " ".join(Tokenizer().decode(dataset.tokens.tolist()).split())
    for number in range(24):
        # of some chapters, the slightly edited copy survives
        found = sum(prose(100 * number + paragraph, 83)[:80] in text for paragraph in range(6))
        assert found >= 4, f"chapter {number} is in the corpus"
    assert "Python" not in text


def test_every_odd_page_meets_its_rule(finished: Path) -> None:
    steps = {step.name: step for step in funnel(finished / "results/x")}
    reasons = {name: dict(step.reasons) for name, step in steps.items()}
    assert {"malformed", "scheme", "private_host", "domain", "extension", "duplicate"} <= reasons["blacklist"].keys()
    assert {"http_404", "timeout", "content_type", "robots"} <= reasons["scrape"].keys()
    assert {"language", "short"} <= reasons["clean"].keys()
    assert sum(reasons["dedup"].values()) == 16, "eight exact and eight near copies"
    order = ["blacklist", "scrape", "clean", "dedup", "tokenize", "merge_index"]
    for earlier, later in pairwise(order):
        assert steps[later].documents_in == steps[earlier].documents_out, "no document is lost between steps"


def test_no_mojibake_navigation_or_comment_reaches_the_corpus(finished: Path) -> None:
    documents = [d for path in sorted((finished / "results/x/dedup").glob("*.zst")) for d in read_shard(path)]
    for document in documents:
        assert "Ã" not in document["text"]
        assert "Privacy" not in document["text"]


def test_a_second_run_does_nothing(finished: Path) -> None:
    before = corpus_bytes(finished)
    assert "Nothing to be done" in run(finished)
    assert corpus_bytes(finished) == before


def kill_and_finish(finished: Path, folder: Path, after: float) -> None:
    """Kill a run after some seconds, run it again, and compare every byte of the corpus."""
    (folder / "site").symlink_to(finished / "site")
    configure(folder)
    process = start(folder)
    time.sleep(after)
    kill_tree(process)
    if list((folder / ".snakemake" / "locks").glob("*")):
        subprocess.run([sys.executable, "-m", "snakemake", "--unlock"], cwd=folder, check=True, capture_output=True)
    run(folder)
    assert corpus_bytes(folder) == corpus_bytes(finished)
    assert not list((folder / "results").rglob("*.tmp"))


@pytest.mark.parametrize("after", [pytest.param(3.0, marks=pytest.mark.slow), 6.0])
def test_a_killed_run_ends_with_the_same_bytes(finished: Path, tmp_path: Path, after: float) -> None:
    kill_and_finish(finished, tmp_path, after)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_at_any_moment_ends_with_the_same_bytes(finished: Path, tmp_path: Path, seed: int) -> None:
    kill_and_finish(finished, tmp_path, random.Random(seed).uniform(0.5, 14))


def test_the_number_of_workers_changes_no_byte(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "site").symlink_to(finished / "site")
    configure(tmp_path)
    run(tmp_path, "--cores", "1")
    assert corpus_bytes(tmp_path) == corpus_bytes(finished)


def test_the_number_of_shards_changes_no_survivor(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "site").symlink_to(finished / "site")
    configure(tmp_path, shards=1)
    run(tmp_path)
    one, two = (
        sorted(d["id"] for path in (folder / "results/x/dedup").glob("*.zst") for d in read_shard(path))
        for folder in (tmp_path, finished)
    )
    assert one == two


@pytest.mark.parametrize(
    ("change", "step", "message"),
    [
        ({"clean": {"language": "fr"}}, "dedup_bands", "no documents in 2 shard(s)"),
        ({"tokenize": {"min_tokens": 100000}}, "merge_index", "no documents in 2 shard(s)"),
    ],
)
def test_a_corpus_that_ends_empty_stops_the_run_with_the_reason(
    finished: Path, tmp_path: Path, change: dict[str, object], step: str, message: str
) -> None:
    folder = tmp_path / "pages"
    shutil.copytree(finished, folder, symlinks=True, ignore=shutil.ignore_patterns(*LINKED, *MADE_FROM_PAGES))
    configure(folder, **change)
    process = start(folder)
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert f"Error in rule {step}" in output and message in output and "Traceback" not in output
    assert "rule scrape" not in output
    assert not list((folder / "results/x").rglob("dataset/*_document.*"))
    statistics = json.loads((folder / "results/x/clean/0000.stats.json").read_text())
    assert statistics["documents_in"] == statistics["documents_out"] + sum(statistics["reasons"].values())
