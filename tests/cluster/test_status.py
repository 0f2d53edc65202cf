import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.corpus_jobs.batches import Request, Shard, accepted, write_batch
from cluster.jobs import State
from cluster.status import main
from common.config import validate
from common.settings import SiteSettings
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import claim, slurm_job
from tests.conftest import Command
from tests.helpers import called

HEAD = "iteration,lm_loss,tokens_per_second,ms_per_iteration,mfu\n"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Four model folders below results/ of the working directory, of which the first trains."""
    monkeypatch.chdir(tmp_path)
    made = [Path("results") / "x" / "models" / name for name in ("a", "b", "c", "d")]
    for folder in made:
        folder.mkdir(parents=True)
    (made[0] / "train.csv").write_text(f"{HEAD}10,9.5,1000.5,500,\n20,7.5,2000.4,250,0.4123\n")
    (made[0] / "valid.csv").write_text("iteration,loss\n20,7.75\n")
    for job, when in {"1000": 1, "999": 0}.items():  # the older job's heartbeat no longer counts
        (made[0] / "heartbeat" / job).mkdir(parents=True)
        beat = {"done": 19 + when, "loss": 7.5, "seconds_left": 3600 * when, "time": when}
        (made[0] / "heartbeat" / job / "rank_00000.json").write_text(json.dumps(beat))
    (made[0] / "settings.yaml").write_text(yaml.safe_dump({"models": {"a": {"train": {"iterations": 14420}}}}))
    return made


def rows(*options: object) -> list[dict[str, Any]]:
    result = called(main, "--json", *options)
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_a_line_shows_how_far_a_training_is_and_how_long_it_takes(
    folders: list[Path], tmp_path: Path, fake: FakeSlurm, command: Command
) -> None:
    slurm_job(folders[0], fake, nodes="node[1-2]")
    claim(folders[0], "slurm-1000.0-3")
    _, line = command("cluster.status", folders[0], cwd=tmp_path).stdout.splitlines()
    expected = "results/x/models/a running 1000 node[1-2] 20/14420 7.5000 7.7500 2000 1:00:00 3"
    assert line.split() == expected.split()


def test_a_collective_call_that_hangs_and_the_documents_of_the_last_spike_are_named(
    folders: list[Path], fake: FakeSlurm
) -> None:
    slurm_job(folders[0], fake)
    beat = {"done": 20, "loss": 7.5, "seconds_left": 3600, "time": 2, "hangs_in": "nccl:all_reduce 8 of mesh_dp"}
    (folders[0] / "heartbeat" / "1000" / "rank_00000.json").write_text(json.dumps(beat))
    (folders[0] / "blame").mkdir()
    for iteration in (12, 20):
        record = {"iteration": iteration, "worst": [f"http://h.example/{iteration}", "a", "b", "c"]}
        (folders[0] / f"blame/iter_{iteration:07d}.json").write_text(json.dumps(record))
    (found,) = rows(folders[0])
    assert found["reason"] == "hangs in nccl:all_reduce 8 of mesh_dp"
    assert found["spikes"] == 2 and found["worst"][0] == "http://h.example/20"
    assert called(main, folders[0]).stdout.splitlines()[-1] == "a: spikes 2, last in http://h.example/20, a, b"


def test_all_jobs_are_shown_with_their_reasons_after_one_call_of_squeue(folders: list[Path], fake: FakeSlurm) -> None:
    slurm_job(folders[0], fake)
    reason = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
    slurm_job(folders[1], fake, "PENDING", reason=reason)
    slurm_job(folders[2], fake, "FAILED", State("1002", "out of restarts", "time limit", restarts=4))
    (folders[3] / "done.json").write_text('{"iteration": 20}')
    found = rows()
    states = [("running", ""), ("queued", reason), ("out of restarts", "time limit"), ("finished", "")]
    assert [(row["state"], row["reason"]) for row in found] == states and len(fake.calls()) == 1
    assert found[0]["seconds_left"] == 3600 and found[0]["mfu"] == 0.4123 and found[1]["seconds_left"] is None
    assert found[3]["iteration"] == 20 and found[2]["restarts"] == 4


def test_without_an_answer_of_slurm_the_files_are_shown(
    folders: list[Path], fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in folders[:3]:
        slurm_job(folder, fake)
    claim(folders[0], "slurm-1000.0-0")
    fake.behave(silent=True)
    for path in (fake.path, "/none"):
        monkeypatch.setenv("PATH", path)
        result = called(main)
        assert result.returncode == 0 and len(result.stderr.splitlines()) == 1, "one note for all"
        assert " running " in result.stdout and "20/14420" in result.stdout


def test_the_live_table_counts_the_shards_of_each_step(folders: list[Path], fake: FakeSlurm) -> None:
    run = folders[0].parent.parent.resolve()
    raw = {"run": str(run), "urls": ["urls.txt"], "shards": 4}
    (run / "config.yaml").write_text(yaml.safe_dump(validate(raw, "test").model_dump(mode="json")))
    (run / "clean").mkdir()
    for name in ("0000.jsonl.zst", "0004.jsonl.zst", "0002.jsonl.zst.1.tmp"):
        (run / "clean" / name).touch()
    slurm_job(folders[0], fake)
    shown = called(main, "--watch").stdout
    assert [words[0] for words in fake.calls()] == ["squeue"] and re.search("^a +running ", shown, re.M)
    assert re.search("^clean .* 1/4 ", shown, re.M), "no temporary file, no shard of an older configuration"
    shards = [Shard(name, name, "clean", "true", "/bin/bash", 1, []) for name in ("0001", "0003")]
    accepted(write_batch(run, shards, [range(1), range(1, 2)], Request(1, 1, 1), SiteSettings()), "1001")
    assert re.search("^clean .* 1/4 +- +- +- ", called(main).stdout, re.M), "Slurm does not know them any more"
    fake.behave(silent=True)
    assert re.search("^clean .* 1/4 +- +2 +- ", called(main).stdout, re.M)
    for number in range(3):  # one shard per 100 seconds, and one is left
        (run / "clean" / f"000{number}.jsonl.zst").touch()
        os.utime(run / "clean" / f"000{number}.jsonl.zst", times=(0, time.time() - 100 * number))
    assert re.search("^clean .* 3/4 .* 0:01:4.$", called(main).stdout, re.M)
