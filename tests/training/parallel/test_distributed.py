"""Who a process is, from its environment; where processes meet, without a port being guessed."""

import socket
import threading
from pathlib import Path

import pytest

from common.errors import ConfigError, JobError
from common.settings import ParallelSettings
from tests.training.helpers import launch
from training.parallel.distributed import Launch, check_world_size, meet, read_launch

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_RESTART_COUNT": "3",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}


def test_submitit_local_tasks_know_their_place() -> None:
    env = {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": "123",
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": "1",
        "SUBMITIT_LOCAL_LOCALID": "1",
    }
    expected = Launch("submitit", 1, 2, 1, 2, 1, "local-123")
    assert read_launch(env) == expected
    assert read_launch({**env, **SLURM}) == expected  # a local job started from inside an allocation


def test_tasks_of_srun_know_their_place_and_restart() -> None:
    assert read_launch(SLURM) == Launch("slurm", 9, 16, 1, 8, 2, "slurm-77.0-3")


def test_the_batch_script_of_a_job_is_a_single_process() -> None:
    batch = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    assert read_launch({**batch, "SLURM_NTASKS": "16"}).launcher == "single"


def test_torchrun_wins_over_the_slurm_job_it_runs_in() -> None:
    expected = Launch("torchrun", 5, 8, 1, 4, 2, "torchrun")
    assert read_launch(TORCHRUN) == expected
    assert read_launch({**SLURM, **TORCHRUN}) == expected


def test_an_empty_environment_is_one_process() -> None:
    assert read_launch({}) == Launch("single", 0, 1, 0, 1, 1, "single")


def test_a_job_of_the_wrong_size_names_both_keys() -> None:
    with pytest.raises(
        ConfigError, match=r"models.big.parallel: pipeline 1 x data 2 x tensor 4 = 8 processes, but 1 were"
    ):
        check_world_size(read_launch({}), ParallelSettings(data=2, tensor=4), "big")


def two_ranks() -> list[Launch]:
    return [Launch("submitit", rank, 2, rank, 2, 1, "local-1") for rank in range(2)]


def test_processes_meet_and_leave_no_file_even_beside_one_of_a_killed_start(tmp_path: Path) -> None:
    with socket.socket() as unused:  # bound but not listening: whoever connects is refused
        unused.bind(("127.0.0.1", 0))
        stale = tmp_path / "meeting-local-1"
        stale.write_text(f"127.0.0.1:{unused.getsockname()[1]}\n")
        stores = {}

        def come(launch: Launch) -> None:
            stores[launch.rank] = meet(launch, tmp_path, timeout=30)

        late = [threading.Timer(delay, come, [launch]) for launch, delay in zip(two_ranks(), (0.5, 0), strict=True)]
        for thread in late:
            thread.start()
        for thread in late:
            thread.join(timeout=40)
        stores[1].set("greeting", "hello")
        assert stores[0].get("greeting") == b"hello"
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_waits_in_vain_says_so(tmp_path: Path, rank: int) -> None:
    with pytest.raises(JobError, match=rf"2 processes of the job did not meet within 1 s \(rank {rank} waited\)"):
        meet(two_ranks()[rank], tmp_path, timeout=1)
    assert not list(tmp_path.iterdir())


def test_a_process_whose_peer_dies_stops_in_one_line(tmp_path: Path) -> None:
    survivor, dead = launch(2, "tests.training.deserter", tmp_path)
    assert (survivor.returncode, dead.returncode) == (2, 7)
    assert "rank 0 leaves because rank 1 failed: it ended without a message" in survivor.stderr
    assert survivor.stderr.count("\n") == 1
