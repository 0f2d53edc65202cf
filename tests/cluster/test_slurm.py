import time
from pathlib import Path

import pytest

from cluster import slurm
from cluster.slurm import QueuedJob, RefusedError
from common.errors import InputError, JobError
from tests.cluster.fake_slurm import POLICY
from tests.cluster.fake_slurm import FakeSlurm


@pytest.mark.parametrize(
    "reason",
    [
        "PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig", "InvalidAccount", "InvalidQOS", "BadConstraints",
        "AccountNotAllowed", "QOSNotAllowed", "AssocMaxWallDurationPerJobLimit", "QOSMaxCpuPerJobLimit",
        "QOSMaxWallDurationPerJobLimit", "ReservationDeleted", "(DependencyNeverSatisfied)",
    ],
)  # fmt: skip
def test_a_reason_that_cannot_pass_is_hopeless(reason: str) -> None:
    assert QueuedJob("1", "x", "PENDING", reason, "").hopeless
    assert not QueuedJob("1", "x", "RUNNING", reason, "").hopeless


@pytest.mark.parametrize(
    "reason",
    [
        "None", "Resources", "Priority", "BeginTime", "Dependency", "JobHeldUser", "AssocGrpCpuLimit",
        "AssocMaxJobsLimit", "AssocGrpGRESMinutes", "QOSGrpCpuLimit", "QOSMaxJobsPerUserLimit", "Reservation",
        "ReqNodeNotAvail, UnavailableNodes:node2",
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    ],
)  # fmt: skip
def test_a_reason_that_passes_when_others_end_is_not(reason: str) -> None:
    assert not QueuedJob("1", "x", "PENDING", reason, "").hopeless


def test_a_command_that_hangs_is_a_silent_controller(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "TIMEOUT", 0.2)
    job = fake.add("tiny").id
    fake.behave(hangs=True)
    started = time.monotonic()
    assert slurm.queue([job]) is None and slurm.details(job) is None and not slurm.requeue(job)
    with pytest.raises(JobError, match=rf"scancel {job}: the controller does not answer"):
        slurm.cancel([job])
    assert time.monotonic() - started < 2.5


def test_jobs_are_found_by_name_and_tasks_of_an_array_one_by_one(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.add("other")
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH --job-name=batch\n#SBATCH --array=0-2%2\ntrue\n")
    number = slurm.submit(script)
    found = slurm.queue(name="batch")
    assert found is not None and [job.id for job in found] == [f"{number}_{index}" for index in range(3)]
    assert [job.id for job in slurm.queue([number]) or []] == [job.id for job in found]


def test_a_refusal_is_one_line_without_the_commands_prefixes(fake: FakeSlurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n")
    fake.behave(refuses="Requested node configuration is not available")
    with pytest.raises(InputError) as error:
        slurm.submit(script)
    refusal, _, cure = str(error.value).partition("; ")
    assert refusal == "Slurm refused the job: Requested node configuration is not available"
    assert cure.startswith("change what it asks of a node")
    fake.behave(refuses="Unspecified error")
    with pytest.raises(InputError, match=r"^Slurm refused the job: Unspecified error$"):
        slurm.submit(script)


def test_the_first_line_of_sbatchs_errors_decides_and_the_cure_names_its_key() -> None:
    wall = RefusedError(f"sbatch: error: AssocMaxWallDurationPerJobLimit\nsbatch: error: {POLICY}\n", "KEY")
    assert str(wall) == (
        "Slurm refused the job: AssocMaxWallDurationPerJobLimit; change the time limit (KEY), or cluster.qos"
    )
    many = RefusedError(f"sbatch: warning: x\nsbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: {POLICY}\n", "")
    assert many.passes and many.too_many and not wall.passes
    assert not RefusedError(f"sbatch: error: {POLICY}\n", "").passes, "it names no limit"


@pytest.mark.parametrize("prints", ["{}\nWelcome to the cluster\n12 jobs are ahead", "{};cluster", "queued, thank you"])
def test_the_id_is_found_whatever_a_sites_sbatch_prints(fake: FakeSlurm, tmp_path: Path, prints: str) -> None:
    fake.add("my run.a", state="COMPLETED")
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH '--job-name=my run.a'\ntrue\n")
    fake.behave(prints=prints)
    assert slurm.submit(script) == "1001"


def test_details_are_what_scontrol_shows(fake: FakeSlurm) -> None:
    job = fake.add("tiny", state="RUNNING", details={"TimeLimit": "01:00:00"}).id
    found = slurm.details(job)
    assert found is not None and (found["JobState"], found["TimeLimit"], found["Restarts"]) == (
        "RUNNING",
        "01:00:00",
        "0",
    )
    assert slurm.details("999") is None
