"""Layouts measured as jobs: of a fake Slurm, which runs them at once, and on this machine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cluster.autotune import main
from common.config import load_settings
from tests.cluster.fake_slurm import FakeJob, FakeSlurm
from tests.conftest import ROOT
from tests.helpers import assert_one_line_error
from tests.training.helpers import Finished, run_main, wait_for, write_config
from training.planning.layout import Layout

MEASURED = {"memory": 3e8, "tokens_per_second": 1000.0}
Seen = Callable[[FakeJob, Path], object]


def written(tmp_path: Path, **cluster: object) -> Path:
    """A configuration of a tiny model on two CPU processes."""
    model = {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8}
    return write_config(tmp_path, model, {"data": 2}, {}, cluster={"tasks_per_node": 2, **cluster})


def results(tmp_path: Path) -> dict[str, Any]:
    """The results so far, by the names of the layouts."""
    return {path.stem: json.loads(path.read_text()) for path in (tmp_path / "autotune/tiny").glob("layout_*.json")}


class Site:
    """The fake Slurm; at each of the command's looks, `happens` to each job that has not ended."""

    def __init__(self, fake: FakeSlurm, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.fake, self.config, self._capsys = fake, config, capsys
        self.happens: Seen = self.finish
        self.most = 0
        """Jobs that were alive together."""
        self.clock = 0.0

    def sleep(self, _seconds: float) -> None:
        """What passes between two looks: an hour."""
        alive = [job for job in self.fake.jobs() if job.state in ("PENDING", "RUNNING")]
        self.most = max(self.most, len(alive))
        self.clock += 3600
        for job in alive:
            self.happens(job, Path(job.script.rpartition("--output ")[2].split()[0]))  # the probe's; srun has one, too

    def finish(self, job: FakeJob, output: Path) -> None:
        """A job measures as many tokens per second as its number says."""
        output.write_text(json.dumps({"measured": {**MEASURED, "tokens_per_second": float(job.id)}}))
        self.fake.change(job.id, state="COMPLETED")

    def tune(self, *arguments: object) -> Finished:
        """Run the command on it."""
        code = run_main(main, "--config", self.config, "--model", "tiny", *arguments)
        said = self._capsys.readouterr()
        return Finished(code, said.out, said.err)


@pytest.fixture
def site(tmp_path: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Site:
    """A Slurm whose jobs finish at once."""
    made = Site(fake, written(tmp_path, executor="slurm"), capsys)
    time = SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.clock)
    monkeypatch.setattr("cluster.trials.time", time)
    return made


def test_the_fastest_of_the_best_predicted_layouts_is_written(tmp_path: Path, site: Site) -> None:
    done = site.tune("--top", 3, "--steps", 2, "--minutes", 7, "--write", tmp_path / "best.yaml")
    assert done.returncode == 0, done.stderr
    jobs = site.fake.jobs()
    assert len(jobs) == 3 == len(results(tmp_path)) and site.most == 1
    assert all("-m training.probe " in job.script and "--steps 2 --output " in job.script for job in jobs)
    assert all("--time=7" in job.options and "--ntasks-per-node=2" in job.options for job in jobs)
    _, head, *rows, last = done.stdout.splitlines()
    assert head.split()[:3] == ["predicted", "tokens/s", "measured"] and len(rows) == 3
    assert rows[2].split()[0] == "3" and "1,002" in rows[2] and last.startswith("fastest: ") and "1,002" in last
    keys = yaml.safe_load((tmp_path / "best.yaml").read_text())["models"]["tiny"]
    raw = yaml.safe_load(site.config.read_text())
    raw["models"]["tiny"] |= {
        "parallel": keys["parallel"],
        "train": {**raw["models"]["tiny"]["train"], **keys["train"]},
    }
    (tmp_path / "merged.yaml").write_text(yaml.safe_dump(raw))
    chosen = load_settings(tmp_path / "merged.yaml").models["tiny"]
    assert chosen.world_size == 2 and chosen.train.global_batch_size == 8
    measured = load_settings(next((tmp_path / "autotune/tiny/snapshots").glob("*/settings.yaml"))).models
    third = next(name for name, result in results(tmp_path).items() if result["measured"]["tokens_per_second"] == 1002)
    assert Layout.of(chosen) == Layout.of(measured[third])


def test_slurm_jobs_run_side_by_side_if_asked(site: Site) -> None:
    assert site.tune("--top", 5, "--side-by-side", 2).returncode == 0
    assert len(site.fake.jobs()) == 5 and site.most == 2


def test_finished_layouts_are_not_run_again_unless_they_or_their_question_changed(site: Site) -> None:
    assert site.tune("--top", 2).returncode == 0
    again = site.tune("--top", 3)
    assert again.returncode == 0 and again.stdout.count("(from an earlier start)") == 2
    assert len(site.fake.jobs()) == 3
    assert site.tune("--top", 3, "model.dropout=0").returncode == 0
    assert len(site.fake.jobs()) == 6


def test_after_ctrl_c_the_same_command_finds_the_job_that_runs(site: Site) -> None:
    def interrupt(job: FakeJob, output: Path) -> None:
        site.fake.change(job.id, state="RUNNING")
        raise KeyboardInterrupt

    site.happens = interrupt
    assert site.tune("--top", 2).returncode == 130
    (job,) = site.fake.jobs()
    assert job.state == "RUNNING", "a Slurm job goes on"
    site.happens = site.finish
    again = site.tune("--top", 2)
    assert again.returncode == 0 and f"job {job.id} is still alive; not started again" in again.stdout
    assert len(site.fake.jobs()) == 2


def test_a_job_that_nobody_recorded_is_found_by_its_name(tmp_path: Path, site: Site) -> None:
    def kill(job: FakeJob, output: Path) -> None:
        next((tmp_path / "autotune/tiny/models").glob("*/job.json")).unlink()  # as if killed just after sbatch
        raise KeyboardInterrupt

    site.happens = kill
    assert site.tune("--top", 1).returncode == 130
    site.happens = site.finish
    assert site.tune("--top", 1).returncode == 0 and len(site.fake.jobs()) == 1


def test_layouts_that_fail_are_rows_and_are_run_again_on_request(tmp_path: Path, site: Site) -> None:
    def fail(job: FakeJob, output: Path) -> None:
        log = tmp_path / f"autotune/tiny/models/{output.stem}/logs/{job.id}_0_log.out"
        log.write_text("loading\nKilled\n")
        if job.id == "1000":
            output.write_text('{"failed": "out of memory (CUDA out of memory.)"}')
        if job.id == "1003":
            return site.finish(job, output)
        site.fake.change(job.id, state={"1000": "FAILED", "1001": "TIMEOUT", "1002": "NODE_FAIL"}[job.id])

    site.happens = fail
    done = site.tune("--top", 4)
    assert done.returncode == 0, done.stderr
    reasons = [line.strip() for line in done.stdout.splitlines() if "failed: " in line]
    assert len(reasons) == 3 and all("_0_log.out" in reason for reason in reasons)
    assert reasons[0].startswith("failed: out of memory (CUDA out of memory.); log: ")
    assert reasons[1].startswith("failed: it did not end within 10 minutes; log: ")
    assert reasons[2].startswith("failed: Slurm's state: NODE_FAIL; it ended without a result: Killed; log: ")
    assert sum("failed" in result for result in results(tmp_path).values()) == 3
    site.happens = site.finish
    assert site.tune("--top", 4).returncode == 0 and len(site.fake.jobs()) == 4
    assert site.tune("--top", 4, "--retry").returncode == 0 and len(site.fake.jobs()) == 7


def test_a_job_that_hangs_is_ended_and_the_next_one_begins(site: Site) -> None:
    def hang(job: FakeJob, output: Path) -> None:
        if job.id == "1000":
            site.fake.change(job.id, state="RUNNING")
        else:
            site.finish(job, output)

    site.happens = hang
    done = site.tune("--top", 2)
    assert done.returncode == 0 and "failed: it did not end within 10 minutes" in done.stdout
    assert site.fake.job("1000").state == "CANCELLED"


def test_a_job_waits_in_the_queue_as_long_as_it_takes_but_not_for_what_never_comes(site: Site) -> None:
    looks: list[str] = []

    def wait(job: FakeJob, output: Path) -> None:
        looks.append(job.id)
        if job.id == "1000":
            site.fake.change(job.id, reason="PartitionTimeLimit")
        elif looks.count(job.id) == 5:  # hours
            site.finish(job, output)

    site.happens = wait
    done = site.tune("--top", 2)
    assert done.returncode == 0, done.stderr
    assert "failed: Slurm would never start it: PartitionTimeLimit" in done.stdout
    assert site.fake.job("1000").state == "CANCELLED"
    assert site.tune("--top", 2).returncode == 0 and len(site.fake.jobs()) == 3, "nothing was learnt about the first"


def test_if_nothing_could_be_measured_the_end_of_a_log_says_why(tmp_path: Path, site: Site) -> None:
    def fail(job: FakeJob, output: Path) -> None:
        log = tmp_path / f"autotune/tiny/models/{output.stem}/logs/{job.id}_0_log.out"
        log.write_text("loading\nImportError: no torch\n")
        site.fake.change(job.id, state="FAILED")

    site.happens = fail
    done = site.tune("--top", 2)
    assert done.returncode == 2
    first, *quoted = done.stderr.splitlines()
    assert first.startswith("error: tiny: none of 2 layouts could be measured; Slurm's state: FAILED; it ended without")
    assert "_0_log.out" in first and quoted == ["    loading", "    ImportError: no torch"]


def test_what_slurm_refuses_is_one_line(tmp_path: Path, site: Site) -> None:
    site.fake.behave(refuses="Invalid partition name specified")
    done = site.tune("--top", 2)
    assert_one_line_error(done, "none of 2 layouts", "Invalid partition name", "cluster.partition")  # type: ignore[arg-type]
    assert results(tmp_path) == {}


@pytest.mark.parametrize(
    ("cluster", "arguments", "says"),
    [
        ({}, ["--side-by-side", 2], "--side-by-side: jobs on one machine would slow each other down"),
        ({"gpus_per_node": 8}, [], "cluster.gpu: name the kind of GPU"),
        ({}, ["--gpu", "h100"], "cluster.gpus_per_node is 0, but --gpu is h100"),
        ({"gpus_per_node": 8}, ["--gpu", "h1000"], "no GPU kind 'h1000' (did you mean 'h100'?)"),
        ({"gpus_per_node": 3, "gpu": "h100", "executor": "slurm"}, ["--gpus", 4], "do not fill whole nodes of 3"),
        (
            {},
            ["--gpus", 7, "model.n_layer=1", "train.global_batch_size=8"],
            "no layout of 7 GPUs takes 8 samples per step",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: dict[str, Any], arguments: list[object], says: str
) -> None:
    config = written(tmp_path, **cluster)
    code = run_main(main, "--config", config, "--model", "tiny", *arguments)
    assert_one_line_error(Finished(code, "", capsys.readouterr().err), says)  # type: ignore[arg-type]


SPOILER = """
import os, sys, time
how = [line.split() for line in open(os.environ["SPOILED"])] if "training.probe" in sys.orig_argv else []
for name, what in how:
    if name in sys.orig_argv:
        print(f"spoiled: {what}", flush=True)
        time.sleep(1000) if what == "hangs" else os._exit(3)
"""


def test_on_this_machine_ctrl_c_ends_the_job_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layout works; the second hangs, and in the second attempt it fails."""
    config, spoiled = written(tmp_path), tmp_path / "spoiled"
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(SPOILER)
    spoiled.write_text("")
    monkeypatch.setenv("SPOILED", str(spoiled))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "python"), str(ROOT)]))
    command = [sys.executable, "-m", "cluster.autotune", "--config", config, "--model", "tiny", "--steps", "1"]
    options = ["--top", "2", "--write", tmp_path / "best.yaml"]
    pipe = subprocess.PIPE

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*map(str, [*command, *options])], cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    first = start()
    models = tmp_path / "autotune/tiny/models"
    wait_for(lambda: results(tmp_path), timeout=120)
    (measured,) = results(tmp_path)
    names = load_settings(next(models.parent.glob("snapshots/*/settings.yaml"))).models
    (other,) = names.keys() - {measured}
    spoiled.write_text(f"{other} hangs\n")
    wait_for(lambda: any("spoiled: hangs" in path.read_text() for path in models.glob(f"{other}/logs/*_log.out")))
    os.killpg(first.pid, signal.SIGINT)
    output, errors = first.communicate(timeout=60)
    assert first.returncode == 130 and "spoiled" not in errors, errors
    job = json.loads((models / other / "job.json").read_text())
    assert not Path(f"/proc/{job['id']}").exists(), "the job ended with it"
    assert [*results(tmp_path)] == [measured]
    spoiled.write_text(f"{other} fails\n{measured} fails\n")
    second = start()
    output, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    assert output.count("(from an earlier start)") == 1
    assert "failed: it ended without a result: spoiled: fails; log: " in output
    assert results(tmp_path)[other]["tail"] == ["spoiled: fails"]
    assert "tiny" in yaml.safe_load((tmp_path / "best.yaml").read_text())["models"]
