"""A process reads its rank and its job from the environment of any launcher."""

import pytest

from common.errors import ConfigError
from common.settings import ParallelSettings
from training.parallel.launch import Launch, check_world_size, read_launch

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


def test_submitit_local_tasks_know_their_rank() -> None:
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


def test_tasks_of_srun_know_their_rank_and_restart() -> None:
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
