"""Layouts measured on a real Slurm, side by side, and found again by a second command."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.slurm.lab import Lab, missing
from tests.slurm.training_job import lay_out

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")


@pytest.mark.slow
def test_the_best_layouts_are_measured_as_jobs_and_the_jobs_outlive_ctrl_c(lab: Lab, tmp_path: Path) -> None:
    job = lay_out(lab, tmp_path)
    command = job.command("autotune", *job.names, "--gpus", "2", "--top", "2", "--side-by-side", "2", "--steps", "2")
    first = lab.start(*command, cwd=ROOT)
    folder = tmp_path / "autotune" / "tiny"
    job.until(lambda: len([*folder.glob("models/*/job.json")]) == 2)
    os.killpg(first.pid, signal.SIGINT)
    first.communicate(timeout=30)
    assert first.returncode == 130
    best = tmp_path / "best.yaml"
    second = lab.run(*command, "--write", str(best), cwd=ROOT, timeout=120)
    assert second.returncode == 0, second.stdout + second.stderr
    results = [json.loads(path.read_text()) for path in folder.glob("layout_*.json")]
    assert len(results) == 2 and all(result["measured"]["tokens_per_second"] > 0 for result in results), results
    ids = {json.loads(path.read_text())["id"] for path in folder.glob("models/*/job.json")}
    known = lab.check("squeue", "--all", "--states=all", "--noheader", "--format=%i %j").splitlines()
    assert {line.split()[0] for line in known if line.split()[1].startswith("tiny-layout_")} == ids and len(ids) == 2
    assert yaml.safe_load(best.read_text())["models"]["tiny"]["train"]["global_batch_size"] == 4
    deadline = time.monotonic() + 30
    while lab.check("squeue", "--noheader"):
        assert time.monotonic() < deadline
        time.sleep(0.5)
