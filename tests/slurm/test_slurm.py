"""Jobs on a real Slurm with two nodes: behaviour that only a scheduler can show."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from common.files import read_json, read_rows
from common.tokenizer import Tokenizer
from corpus.index import IndexWriter, Meta, token_dtype
from demo.build import build_site
from tests.conftest import ROOT
from tests.helpers import prose
from tests.slurm.lab import SYSTEM_FOLDER, missing, slurm
from tests.training.helpers import wait_for
from tests.workflow.test_all import TINY
from tests.workflow.test_run import configure, corpus_bytes, run

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("lab")) as environment:
        yield environment


def training_run(folder: Path, **cluster: object) -> Path:
    """A configuration with a dataset, tensor parallel over two nodes with one task each."""
    tokenizer = Tokenizer()
    with IndexWriter(folder / "dataset" / "corpus_text_document", token_dtype(50257), Meta(50257, 50256)) as index:
        for number in range(20):
            index.add_document([*tokenizer.encode(prose(number)).tolist(), 50256])
    slurm_settings = {"executor": "slurm", "tasks_per_node": 1, "mem_gb_per_task": 2, **cluster}
    config = {"run": str(folder), "urls": ["none"], "models": {"tiny": TINY}, "cluster": slurm_settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def submit(environment: dict[str, str], config: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cluster.submit", "--config", str(config), "--model", "tiny", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_a_model_is_trained_tensor_parallel_over_two_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    result = submit(cluster, training_run(tmp_path), "--wait")
    assert result.returncode == 0, result.stderr
    model_folder = tmp_path / "models" / "tiny"
    done = read_json(model_folder / "done.json")
    assert done["iteration"] == 12
    job = read_json(model_folder / "job.json")
    text = _state(cluster, job["id"])
    assert "JobState=COMPLETED" in text and "NodeList=node[1-2]" in text and "NumNodes=2" in text


def test_a_job_that_is_still_alive_is_not_submitted_again(cluster: dict[str, str], tmp_path: Path) -> None:
    config = training_run(tmp_path)
    first = submit(cluster, config)
    assert "submitted job" in first.stdout, first.stderr
    second = submit(cluster, config, "--wait")
    assert "not submitted again" in second.stdout and second.returncode == 0, second.stderr
    assert (tmp_path / "models" / "tiny" / "done.json").exists()


def test_a_job_that_fails_is_failed_for_slurm_and_quoted_for_people(cluster: dict[str, str], tmp_path: Path) -> None:
    config = training_run(tmp_path)
    (tmp_path / "dataset" / "corpus_text_document.bin").unlink()
    result = submit(cluster, config, "--wait")
    assert result.returncode == 2
    assert "corpus_text_document.bin: no such file" in result.stderr and "Traceback" not in result.stderr
    assert "JobState=FAILED" in _state(cluster, read_json(tmp_path / "models" / "tiny" / "job.json")["id"])


@pytest.mark.slow
def test_a_job_that_is_told_to_stop_saves_and_the_next_one_goes_on(cluster: dict[str, str], tmp_path: Path) -> None:
    config = training_run(tmp_path)
    settings = yaml.safe_load(config.read_text())
    train = settings["models"]["tiny"]["train"]
    config.write_text(
        yaml.safe_dump(
            {**settings, "models": {"tiny": {**TINY, "train": {**train, "iterations": 10**6, "save_interval": 10**6}}}}
        )
    )
    submit(cluster, config)
    folder = tmp_path / "models" / "tiny"
    wait_for(lambda: len(read_rows(folder / "train.csv")) >= 3, timeout=120)
    job = read_json(folder / "job.json")["id"]
    subprocess.run(["scancel", "--signal=TERM", job], env=cluster, check=True)
    wait_for(lambda: "RUNNING" not in _state(cluster, job), timeout=60)
    (saved,) = folder.glob("iter_*")
    state = _state(cluster, job)
    assert "JobState=FAILED" in state and "ExitCode=75:0" in state, state
    done = int(saved.name.removeprefix("iter_")) + 2
    settings["models"]["tiny"]["train"] = {**train, "iterations": done}
    config.write_text(yaml.safe_dump(settings))
    assert submit(cluster, config, "--wait").returncode == 0
    assert read_json(folder / "done.json")["iteration"] == done
    log = (folder / "logs" / f"{read_json(folder / 'job.json')['id']}_0_log.out").read_text()
    assert f"resumed from {saved}" in log


def _state(cluster: dict[str, str], job: str) -> str:
    show = ["scontrol", "show", "job", job]
    return subprocess.run(show, env=cluster, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_the_corpus_made_on_slurm_has_the_bytes_of_the_one_made_here(tmp_path: Path) -> None:
    """With the profile as it is, on a cluster without accounting."""
    here, there = tmp_path / "here", tmp_path / "there"
    build_site({f"Chapter {n}": "\n\n".join(prose(10 * n + p, 83) for p in range(6)) for n in range(12)}, here / "site")
    configure(here)
    run(here)
    there.mkdir()
    (there / "site").symlink_to(here / "site")
    configure(there)
    (there / "slurm").symlink_to(ROOT / "slurm")
    # Snakemake strips SLURM_* from the environment of its jobs; in the lab's namespace they find /etc/slurm
    lab = [sys.executable, "-m", "tests.slurm.lab", "--"]
    patience = ["--slurm-init-seconds-before-status-checks", "2"]
    run(there, "--profile", "slurm", *patience, inside=lab, PYTHONPATH=str(ROOT))
    assert corpus_bytes(there) == corpus_bytes(here)


def test_the_lab_returns_the_exit_code_and_hands_out_its_gpus(tmp_path: Path) -> None:
    script = "srun --nodes 2 --gres gpu:1 printenv SLURMD_NODENAME CUDA_VISIBLE_DEVICES && ls /etc/slurm && exit 7"
    outside = sorted(path.name for path in SYSTEM_FOLDER.iterdir())
    lab = [sys.executable, "-m", "tests.slurm.lab", "--gpus", "2", "--", "bash", "-c", script]
    result = subprocess.run(lab, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 7, result.stderr
    assert sorted(result.stdout.split()) == ["0", "0", "gres.conf", "node1", "node2", "slurm.conf"]
    assert sorted(path.name for path in SYSTEM_FOLDER.iterdir()) == outside
