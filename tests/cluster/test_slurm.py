import threading
from pathlib import Path

import pytest

from cluster import slurm
from cluster.slurm import QueuedJob, RefusedError
from common.errors import InputError, JobError
from common.settings import SiteSettings
from tests.cluster.fake_slurm import POLICY, FakeSlurm

UNSCHEDULABLE = (
    "PartitionTimeLimit PartitionNodeLimit PartitionConfig InvalidAccount InvalidQOS BadConstraints AccountNotAllowed "
    "QOSNotAllowed AssocMaxWallDurationPerJobLimit QOSMaxCpuPerJobLimit QOSMaxWallDurationPerJobLimit QOSMinGRES "
    "ReservationDeleted (DependencyNeverSatisfied) JobHoldMaxRequeue"
).split()
PASSING = (
    "None Resources Priority BeginTime Dependency JobHeldUser AssocGrpCpuLimit AssocMaxJobsLimit AssocGrpGRESMinutes "
    "QOSGrpCpuLimit QOSMaxJobsPerUserLimit Reservation"
).split()


def test_a_reason_that_cannot_pass_is_unschedulable_and_others_are_not() -> None:
    odd = ["ReqNodeNotAvail, UnavailableNodes:node2", "Nodes required for job are DOWN, DRAINED or reserved for jobs"]
    pending = [QueuedJob("1", "x", "PENDING", reason, "") for reason in [*UNSCHEDULABLE, *PASSING, *odd]]
    assert [job.reason for job in pending if job.unschedulable] == UNSCHEDULABLE
    assert not any(QueuedJob("1", "x", "RUNNING", reason, "").unschedulable for reason in UNSCHEDULABLE)


def test_a_command_that_hangs_is_a_silent_controller(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "TIMEOUT", 0.1)
    job, answers = fake.add("tiny", state="RUNNING").id, threading.Event()
    fake.behave(meanwhile=lambda _: answers.wait())
    assert slurm.queue([job]) is None and slurm.details(job) is None and not slurm.requeue(job)
    with pytest.raises(JobError, match=rf"scancel {job}"):
        slurm.cancel([job])
    answers.set()


def test_the_first_line_of_sbatchs_errors_decides_and_the_cure_names_its_key(fake: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\n")
    fake.behave(refuses="Batch job submission failed: Requested node configuration is not available")
    with pytest.raises(InputError, match="Requested node"):
        slurm.submit(tmp_path / "job.sh")
    for reason, key in (
        ("invalid partition specified: x", "cluster.partition"),
        ("AssocMaxWallDurationPerJobLimit", "(KEY), or cluster.qos"),
    ):
        refused = RefusedError(f"sbatch: warning: x\nsbatch: error: {reason}\nsbatch: error: {POLICY}\n", "KEY")
        assert reason in str(refused) and key in str(refused) and not refused.passes
    many = RefusedError(f"sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: {POLICY}\n", "")
    busy = RefusedError("sbatch: error: Socket timed out on send/recv operation\n", "")
    assert many.passes and many.too_many and busy.passes and not busy.too_many
    away = RefusedError("sbatch: error: Batch job submission failed: Unable to contact slurm controller\n")
    assert "refused" in str(many) and not [error for error in (busy, away) if "refused" in str(error)]
    assert not RefusedError(f"sbatch: error: {POLICY}\n", "").passes, "it names no limit"


@pytest.mark.parametrize("prints", ["Budget:\n4711\n{}\nWelcome\n12 jobs are ahead", "{};cluster"])
def test_the_id_is_found_whatever_a_sites_sbatch_prints(fake: FakeSlurm, tmp_path: Path, prints: str) -> None:
    fake.add("my run.a", state="COMPLETED")
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH '--job-name=my run.a'\ntrue\n")
    fake.behave(prints=prints)
    assert slurm.submit(script) == "1001"


def test_times_are_read_as_slurm_writes_them() -> None:
    assert [slurm.seconds(text) for text in ("00:10:00", "2-03:04:05")] == [600, 2 * 86400 + 3 * 3600 + 245]


def test_commands_get_neither_the_filters_of_the_user_nor_the_options_of_an_outer_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = ("SLURM_CONF", "SBATCH_ACCOUNT", "SBATCH_PARTITION", "PYTHONPATH")
    dropped = ("SQUEUE_USERS", "SLURM_TIME_FORMAT", "SLURM_MEM_PER_CPU", "SBATCH_TIMELIMIT", "SCANCEL_INTERACTIVE")
    for name in (*kept, *dropped):
        monkeypatch.setenv(name, "x")
    assert {*kept} <= {*slurm.environment()} and not {*dropped} & {*slurm.environment()}
    assert "SBATCH_PARTITION" not in slurm.environment(SiteSettings(partition="cpu")), "it would win over the script"


def test_a_name_may_contain_anything(fake: FakeSlurm) -> None:
    job = fake.add("a|b", state="RUNNING")
    assert [(one.name, one.state) for one in slurm.queue([job.id]) or []] == [("a|b", "RUNNING")]
