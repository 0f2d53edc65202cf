"""If one process of a job fails, its error is printed with its rank, and the others leave."""

import signal
from pathlib import Path

import pytest

from common.errors import RESUME_ME
from tests.training.helpers import TINY, Job, launch, make_run
from training.launch.failure_monitor import Failure, FailureMonitor, Hub


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("start", "corpus.bin: no such file"),
        ("memory", "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.)"),
        ("save", "rank_1_0.safetensors: No space left on device"),
    ],
)
def test_a_rank_that_fails_alone_is_printed_and_named_by_the_others(tmp_path: Path, where: str, says: str) -> None:
    config = make_run(tmp_path, model=TINY, parallel={"data": 2})
    well, failed = launch(2, "tests.training.failing", "--config", config, "--model", "tiny", where)
    assert (well.returncode, failed.returncode) == (2, 2), (well, failed)
    assert failed.stderr.startswith(f"error: rank 1: {says}") and failed.stderr.count("\n") == 1
    assert well.stderr.startswith("error: rank 0 ") and f"rank 1 failed: {says}" in well.stderr
    assert well.stderr.count("\n") == 1
    left = {path.name for path in (tmp_path / "models/tiny").iterdir()}
    assert not [name for name in left if name.startswith("meeting") or name.startswith("iter_") > name.endswith("tmp")]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_makes_the_others_leave_to_be_resumed(tmp_path: Path, killed: int) -> None:
    config = make_run(tmp_path, model=TINY, parallel={"data": 2}, train={"iterations": 10**6, "save_interval": 10**6})
    with Job(2, "training.train", "--config", config, "--model", "tiny") as job:
        job.wait_until_said("lm loss")
        job.signal(signal.SIGKILL, killed)
        survivor = job.wait()[1 - killed]
    assert survivor.returncode == RESUME_ME
    assert f"rank {1 - killed} exits because rank {killed} failed" in survivor.stderr
    assert survivor.stderr.count("\n") == 1


def test_the_first_failure_is_the_one_that_all_ranks_leave_with() -> None:
    hub = Hub("127.0.0.1", 3)
    healthy, first, second = (FailureMonitor(rank, "127.0.0.1", hub.port) for rank in range(3))
    failure = Failure(1, "no space", 2)
    assert first.fail(failure) == failure
    assert second.fail(Failure(2, "lost contact", RESUME_ME)) == failure == healthy.wait()
