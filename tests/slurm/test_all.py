"""`snakemake --profile slurm all`: from URLs to generated text, with the bytes and digits of a run on one machine."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.files import read_json
from demo.build import build_site
from tests.conftest import ROOT
from tests.helpers import prose
from tests.slurm.lab import Lab, missing, slurm
from tests.workflow.test_all import TINY
from tests.workflow.test_run import configure, corpus_bytes

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")]


def lay_out(folder: Path, site: Path, executor: str) -> Path:
    folder.mkdir()
    (folder / "site").symlink_to(site)
    (folder / "slurm").symlink_to(ROOT / "slurm")
    cluster = {"executor": executor, "cpus_per_task": 1, "corpus": {"shards_per_job": 1}}
    generate = {"prompt": "The", "max_tokens": 5}
    models = {"tiny": TINY}
    configure(folder, train_models=["tiny"], models=models, generate=generate, cluster=cluster, shards=4)
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on this machine; its site serves the other runs, too."""
    folder = tmp_path_factory.mktemp("runs")
    chapters = {f"Chapter {n}": "\n\n".join(prose(10 * n + p, 83) for p in range(6)) for n in range(12)}
    build_site(chapters, folder / "site")
    lay_out(folder / "here", folder / "site", "local")
    command = [sys.executable, "-m", "snakemake", "all", "--quiet", "host"]
    subprocess.run(command, cwd=folder / "here", check=True, timeout=300)
    return folder / "here"


@pytest.fixture(scope="module", params=[False, True], ids=["without accounting", "with accounting"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if reason := missing(accounting=request.param):
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("lab"), accounting=request.param) as running:
        yield running


def assert_same(there: Path, here: Path) -> None:
    assert corpus_bytes(there) == corpus_bytes(here)
    done = "results/x/models/tiny/done.json"
    assert read_json(there / done) == read_json(here / done)
    sample = "results/x/samples/tiny.txt"
    assert (there / sample).read_text() == (here / sample).read_text()


def test_all_on_slurm_equals_all_here(cluster: Lab, tmp_path: Path, here: Path) -> None:
    there = lay_out(tmp_path / "there", here.parent / "site", "slurm")
    result = cluster.run(sys.executable, "-m", "snakemake", "--profile", "slurm", "all", cwd=there, timeout=500)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    assert_same(there, here)


def test_all_survives_a_controller_that_is_away_for_a_minute(lab: Lab, tmp_path: Path, here: Path) -> None:
    there = lay_out(tmp_path / "there", here.parent / "site", "slurm")
    running = lab.start(sys.executable, "-m", "snakemake", "--profile", "slurm", "all", cwd=there)
    try:
        lab.wait(lambda: list((there / "results/x/pages").glob("*.jsonl.zst")), timeout=200)
        for job in lab.check("squeue", "--noheader", "--format=%A").split()[:1]:
            lab.wait_saved(job)
        lab.stop_controller()
        time.sleep(60)
        assert running.poll() is None
    finally:
        lab.start_controller()
    output, _ = running.communicate(timeout=500)
    assert running.returncode == 0, output
    assert_same(there, here)
