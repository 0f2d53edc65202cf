import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
import yaml

from cluster import watch
from cluster.corpus_jobs.batches import Request, Shard, accepted, write_batch
from cluster.corpus_progress import CorpusTasks, corpus_progress
from cluster.slurm import submit
from cluster.status import main
from common.config import load_settings, validate
from common.settings import Settings, SiteSettings
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import Call, claim, slurm_job
from tests.conftest import ROOT
from tests.helpers import assert_one_line_error

MODEL = {"model": {"n_layer": 1, "n_head": 1, "n_embd": 8}, "train": {"iterations": 100, "micro_batch_size": 1}}


def configure(folder: Path, **more: object) -> Settings:
    """A run of 4 shards and a model in `folder`, of which nothing is done."""
    raw = {"run": str(folder), "urls": ["urls.txt"], "shards": 4, "models": {"tiny": MODEL}, "train_models": ["tiny"]}
    settings = validate(raw | more, "test")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    return settings


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run below results/ of the working directory that cleans its third shard, after an older one with more."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "x"
    configure(folder)
    touch(folder, "urls/stats.json", *(f"pages/{n:04d}.jsonl.zst" for n in range(4)))
    touch(folder, "clean/0000.jsonl.zst", "clean/0001.jsonl.zst", "clean/0004.jsonl.zst", "clean/0002.jsonl.zst.1.tmp")
    return folder


def steps(text: str) -> dict[str, list[str]]:
    """The words after the bar of each step's row."""
    block = text.split("\n\n")[1]
    return {re.split(r"  +", line)[0]: line.split("░")[-1].split("█")[-1].split() for line in block.splitlines()[1:]}


def test_a_table_counts_the_finished_shards_of_each_step(run: Path, call: Call) -> None:
    result = call(main, "--watch")
    found = steps(result.stdout)
    assert [found[name][0] for name in ("blacklist", "scrape", "tokenize")] == ["1/1", "4/4", "0/4"]
    assert found["clean"][0] == "2/4", "temporary files and shards of an older configuration do not count"
    assert found["clean"][-1] != "-" and found["scrape"][-1] == "-"
    assert re.search("^tiny +not started ", result.stdout, re.M)
    (model := run / "models" / "tiny").mkdir(parents=True)
    one = call(main, "--watch", model)
    assert "scrape" not in one.stdout and re.search("^tiny +no job ", one.stdout, re.M), one.stderr
    assert_one_line_error(call(main, "--watch", run / "none"), f"{run}/none")


def test_steps_follow_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "e.txt").touch()
    (tmp_path / "t.txt").touch()
    texts, kept_out = str(tmp_path / "t.txt"), str(tmp_path / "e.txt")
    settings = configure(tmp_path / "run", urls=[], sources=[{"path": texts}], decontaminate={"files": [kept_out]})
    touch(settings.run, "dedup/clusters.json")
    progress = {step.name: step for step in corpus_progress(settings, CorpusTasks([]))}
    assert list(progress)[:2] == ["ingest", "clean"] and "decontaminate count" in progress
    assert progress["dedup signatures"].done == 4, "they are removed when the clusters are known"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_shards_that_run_on_this_machine_are_counted(run: Path) -> None:
    touch(run, "logs/dedup_bands/0.log", "logs/clean/0002.log", "logs/clean/0003.log")
    with contextlib.ExitStack() as stack:
        for name in ("dedup_bands/0", "clean/0002", "clean/0002"):  # two processes of one shard
            log = stack.enter_context((run / "logs" / f"{name}.log").open("w"))
            process = stack.enter_context(subprocess.Popen(["sleep", "60"], stdout=log))
            stack.callback(process.kill)
        progress = corpus_progress(load_settings(run / "config.yaml"), CorpusTasks([]))
    assert {step.name: step.running for step in progress if step.running} == {"clean": 1, "dedup clusters": 1}


def test_the_time_left_follows_the_pace_of_the_newest_shards(run: Path) -> None:
    now = time.time()
    for number, age in ((0, 3000), (1, 1000)):
        os.utime(run / "clean" / f"{number:04d}.jsonl.zst", (now, now - age))
    progress = corpus_progress(load_settings(run / "config.yaml"), CorpusTasks([]))
    (left,) = [step.seconds_left for step in progress if step.name == "clean"]
    assert left == pytest.approx(2 * 3000, rel=0.01), "one shard in the 3,000 s since the first"


def test_corpus_and_training_jobs_are_one_call_of_squeue(run: Path, fake: FakeSlurm) -> None:
    model = run / "models" / "tiny"
    model.mkdir(parents=True)
    slurm_job(model, fake, nodes="node1")
    claim(model, "slurm-1000.0-2")
    (model / "train.csv").write_text("iteration,lm_loss,tokens_per_second,ms_per_iteration\n40,3.5,2000,100\n")
    (model / "settings.yaml").write_text(yaml.safe_dump({"models": {"tiny": {"train": {"iterations": 100}}}}))
    shards = [Shard(str(n), f"{n:04d}", "clean", "true", "bash", 1, []) for n in range(4)]
    tasks = write_batch(run, shards, [range(2), range(2, 4)], Request(1, None, None), SiteSettings())
    accepted(tasks, array := submit(tasks[0].folder / "batch.sh"))
    fake.change(f"{array}_0", state="RUNNING")
    events = [{"begin": 0, "job": f"{array}_0"}, {"start": 0, "time": 1.0}]
    events += [{"end": 0, "exit": 1, "seconds": 1, "max_rss_mb": 1}, {"start": 1, "time": 2.0}]
    (tasks[0].folder / "0.results").write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in events))

    before = len(fake.calls())
    text = watch.table(watch.find([]), {})
    assert [call[0] for call in fake.calls()[before:]] == ["squeue"]
    assert steps(text)["clean"][1:4] == ["1", "2", "1"], "running, queued, failed"
    line = next(line for line in text.splitlines() if line.startswith("tiny"))
    assert line.split() == "tiny running 1000 node1 40/100 3.5000 - 2000 0:00:06 2".split()
    fake.behave(silent=True)
    assert "controller" in watch.table(watch.find([]), {})


def test_a_terminal_is_drawn_again_until_ctrl_c(run: Path) -> None:
    script = (
        "import sys, cluster.watch\n"
        "from cluster.status import main\n"
        "cluster.watch.INTERVAL = 0.2\n"
        f"sys.exit(main(['--watch', {str(run)!r}]))"
    )
    terminal, ours = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=ours, stderr=ours, env=environment) as process:
        os.close(ours)
        shown, interrupted = b"", False
        with contextlib.suppress(OSError):  # EIO: the terminal was closed
            while data := os.read(terminal, 4096):
                shown += data
                if shown.count(b"Ctrl-C ends this table") == 2:
                    touch(run, "clean/0002.jsonl.zst")
                if b"3/4" in shown and not interrupted:
                    interrupted = True
                    process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    os.close(terminal)
    assert b"2/4" in shown and b"Traceback" not in shown
