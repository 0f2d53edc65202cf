"""A process reads its rank and its job from the environment of any launcher."""

from training.launch.rank import Launch, read_launch

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
TORCHRUN |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "2"}
LOCAL = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "123",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
}


def test_a_process_knows_its_rank_in_a_job_of_any_launcher_and_what_was_started_inside_an_allocation_wins() -> None:
    assert read_launch({}) == Launch("single", 0, 1, 0, 1, 1, "single")
    assert read_launch({**SLURM, **LOCAL}) == Launch("submitit", 1, 2, 1, 2, 1, "local-123")
    assert read_launch(SLURM) == Launch("slurm", 9, 16, 1, 8, 2, "slurm-77.0-3")
    assert read_launch({**SLURM, **TORCHRUN}) == Launch("torchrun", 5, 8, 1, 4, 2, "torchrun-node1-29500-2")
    batch = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    assert read_launch({**batch, "SLURM_NTASKS": "16"}).launcher == "single", "a batch script"
