"""Snakemake's executor for corpus jobs on Slurm: many shards in few sbatch calls.

    snakemake --profile slurm dataset
    snakemake --profile slurm -n dataset    # also prints what would be submitted

The DAG has one job per shard and step. This executor holds the jobs of a rule until all of them are
ready (`dag_jobs.PendingJobs`), packs them into the tasks of one job array (`batches`), and reports
each shard by itself as soon as its task has written the result. A shard's command runs directly in
the task (`run_batch`), without a Snakemake there.

Success and failure are read from the result files. squeue is asked once per interval for all
arrays, and only to find tasks that ended without finishing their list (`failures` says why); sacct
is never asked. What a Snakemake that died has left in Slurm is adopted, or cancelled before the
same shard runs again (`dag_jobs.OrphanedJobs`).

One thread does all the work; `run_job` only passes it a job. squeue runs in a second one, because
it may take minutes.
"""

import atexit
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.real import RealExecutor
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from cluster import slurm
from cluster.corpus_jobs import batches, dag_jobs, failures
from cluster.corpus_jobs.batches import Task
from cluster.corpus_jobs.dag_jobs import OrphanedJobs, PendingJobs, ShardJob, time_limit
from cluster.corpus_jobs.queue import Queue, hidden
from cluster.corpus_jobs.submitter import Submitter
from cluster.slurm import QueuedJob
from common.errors import USER_ERROR, InputError, JobError, ToolkitError
from common.settings import Settings

POLL = 1.0  # seconds between two reads of the result files

common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_envvar_declarations_to_cmd=True,
    auto_deploy_default_storage_provider=False,
)


@dataclass
class ExecutorSettings(ExecutorSettingsBase):  # type: ignore[misc]
    """No options. Snakemake creates it if this executor was chosen, for a dry run too."""

    def __post_init__(self) -> None:
        atexit.register(dag_jobs.print_plan)


class Executor(RealExecutor):  # type: ignore[misc]
    """The executor `slurm-batch`; see the module's docstring."""

    cores = get_exec_mode = get_python_executable = None  # of executors that run a Snakemake inside each job

    def __post_init__(self) -> None:
        if dag_jobs.parsed is None:
            raise WorkflowError("executor slurm-batch runs this toolkit's Snakefile only")
        self.settings: Settings = dag_jobs.parsed[1]
        dag_jobs.unlimit_threads(self.workflow)
        needed = [job for job in self.dag.needrun_jobs() if not job.is_local]
        self._pending, self._orphans = PendingJobs(needed), OrphanedJobs(self.settings, needed)
        self._incoming: SimpleQueue[Any] = SimpleQueue()
        self._open: list[Task] = []  # tasks that jobs of this run wait for
        self._working: set[str] = set()  # rules with a shard that has started
        self._troubles: dict[str, str] = {}
        self._submitter = Submitter(
            self.settings,
            lambda job: self.workflow.async_run(job.prepare()),
            self._submitted,
            self._report_trouble,
        )
        self._queue = Queue(
            float(self.workflow.remote_execution_settings.seconds_between_status_checks),
            float(self.workflow.execution_settings.latency_wait),
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._main, name="slurm-batch", daemon=True)
        self._thread.start()

    # What Snakemake calls, from its main thread.

    def run_job(self, job: Any) -> None:
        """Take a job that is ready."""
        self.run_job_pre(job)
        self._incoming.put(job)

    def shutdown(self) -> None:
        """Stop; called when nothing of ours is left, and after an error."""
        self._stopped.set()
        self._thread.join()

    def cancel(self) -> None:
        """Cancel everything that was submitted; called after Ctrl-C."""
        try:
            self.shutdown()
            self._cancel(self._open)
        except KeyboardInterrupt:  # again, because a command of Slurm hangs
            for task in batches.recorded(self.settings.run):
                task.abandon()

    # The thread.

    def _main(self) -> None:
        try:
            while not self._stopped.wait(max(POLL, len(self._open) / 100)):  # at most 100 files per second
                self._step()
        except Exception as error:
            cured = WorkflowError(str(error)) if isinstance(error, ToolkitError | OSError) else error
            self.workflow.scheduler.executor_error_callback(cured)

    def _step(self) -> None:
        while not self._incoming.empty():
            job = self._incoming.get()
            self._pending.arrived(job)
            item = dag_jobs.describe(job, self.settings)
            if not self._orphans.claims(item):
                self._pending.jobs[item] = None
        self._read_results()
        if answer := self._queue.poll({*self._open, *(task for _, task, _ in self._orphans.claimed)}):
            self._check_queue(*answer)
        if self._submitter.may_submit:
            self._submitter.submit(self._pending.ready(self._is_busy(), lambda: self.workflow.scheduler.running))

    def _is_busy(self) -> bool:
        """Whether tasks of this run or of an earlier one are queued or running."""
        return bool(self._open or self._orphans.claimed)

    # Results.

    def _submitted(self, item: ShardJob, task: Task, number: int) -> None:
        """Wait for a job of a batch that Slurm has accepted."""
        del self._pending.jobs[item]
        self._wait_for(item, task, number)

    def _wait_for(self, item: ShardJob, task: Task, number: int) -> None:
        """Let a job wait for a shard of a task that Slurm has."""
        item.again, task.waiting[number] = True, item
        if task not in self._open:
            self._open.append(task)
        self.report_job_submission(_info(item, task))

    def _read_results(self) -> None:
        for task in list(self._open):
            task.read()
            self._working |= {task.shards[number].rule for number in task.started}
            for number, item in _jobs(task).items():
                if (result := task.ended.get(number)) is None:
                    continue
                del task.waiting[number]
                self._pending.touch()
                if result["exit"]:
                    trouble = failures.disk_trouble(task, [item])
                    retry = result["exit"] != USER_ERROR and not trouble
                    self._fail([item], failures.shard_failure(result, item.request, trouble), task, retry=retry)
                else:
                    self.report_job_success(_info(item, task))
            if not _jobs(task):
                self._close(task)

    def _close(self, task: Task) -> None:
        """Remove a task for which no job of this run waits, and its batch if it is done."""
        self._open.remove(task)
        self._submitter.task_ended()
        if len(task.ended) == len(task.shards) and not any(result["exit"] for result in task.ended.values()):
            task.log.unlink(missing_ok=True)
        batches.remove_if_done(task)

    def _fail(self, members: Sequence[ShardJob], reason: str, task: Task | None = None, *, retry: bool = True) -> None:
        """Report jobs as failed, with the reason once; without `retry`, for good."""
        for number, item in enumerate(members):
            if not retry:
                dag_jobs.give_up(item.job)
            if number:
                self.workflow.scheduler.error_callback(item.job)
                continue
            others = f" (and {len(members) - 1} others of this task)" if len(members) > 1 else ""
            printed = failures.last_lines(task.log) if task else ""
            logs = [str(task.log)] if task and printed else []
            self.report_job_error(_info(item, task), msg=f"{reason}{others}{printed}", aux_logs=logs)

    # The queue.

    def _check_queue(self, asked: set[Task], queued: list[QueuedJob] | None) -> None:
        """Handle tasks that ended without finishing their list, and orphaned jobs."""
        if queued is None:
            self._report_trouble("squeue", "Slurm's controller does not answer; waiting for it")
            return
        self._report_trouble("squeue", "")
        queue = {job.id: job for job in queued}
        for task in hidden(asked, queue):
            queue |= slurm.unknown([task.job])
            self._report_trouble(
                task.array,
                f"Slurm does not show you another user's job {task.array} (PrivateData), which may still run; waiting "
                f"for it. If it has ended, remove {task.folder} and run the same command again.",
            )
        self._handle_orphans(queue, asked)
        for task in [task for task in self._open if task in asked]:
            job = queue.get(task.job)
            task.node = job.nodes if job and job.nodes else task.node
            if job is not None and job.unschedulable:
                key = time_limit(task.shards[0].rule)
                self._end(task, f"job {task.job}: {slurm.never_starts(job, key)}")
            elif self._queue.has_left(task, job):
                task.left_slurm = True
                self._read_results()
                if task in self._open:
                    self._handle_early_end(task, job.state if job else "")
            elif job is not None and job.reason not in self._troubles and (why := slurm.not_yet(job)):
                self._report_trouble(job.reason, why)

    def _handle_early_end(self, task: Task, state: str) -> None:
        """Fail or resubmit the shards that a task which ended early did not finish."""
        task.abandon()  # it starts nothing more, even if Slurm has it under another id
        end, left, failed = failures.task_end(task, state), _jobs(task), []
        if why := failures.final(task, left.values(), state):
            self._end(task, f"{end}: {why}")
            return
        if failures.blames_node(task, state):
            self._avoid(task, end)
        for number, item in left.items():
            del task.waiting[number]
            if failures.blames_shard(item, number, task, state, item.shard.rule in self._working):
                failed.append(item)
            else:
                self._pending.jobs[item] = None
        if failed:
            reason = failures.task_failure(failed[0], task, state)
            self._fail(failed, reason, task, retry=bool(task.started))
        self._close(task)

    def _avoid(self, task: Task, end: str) -> None:
        """Submit nothing more to the node of a task; say so once."""
        self._submitter.avoided[task.node] = None
        if task.node not in self._troubles:
            self._report_trouble(task.node, failures.why_avoided(task, end))

    def _end(self, task: Task, reason: str) -> None:
        """Abandon a task: cancel it in Slurm, and report its shards as failed for good."""
        self._cancel([task])
        members = _jobs(task)
        for number in members:
            del task.waiting[number]
        self._fail(list(members.values()), reason, task, retry=False)
        self._close(task)

    def _cancel(self, tasks: Iterable[Task]) -> None:
        """Cancel tasks in Slurm; they start nothing more, whether Slurm answers or not."""
        chosen = list(tasks)
        for task in chosen:
            task.abandon()
        others = {task.folder for task in self._open if task not in chosen}
        # a whole array by its own id: a command line of thousands of tasks would be too long
        jobs = sorted({task.job if task.folder in others else task.array for task in chosen if task.job})
        try:
            if jobs:
                slurm.cancel(jobs)
        except (JobError, InputError) as error:
            self.logger.warning(f"{error}; the jobs end by themselves before their next shard")

    def _handle_orphans(self, queue: dict[str, QueuedJob], asked: set[Task]) -> None:
        """Adopt, cancel or repeat those jobs of a dead Snakemake that are ready in this run."""
        for item, task, number in [claim for claim in self._orphans.claimed if claim[1] in asked]:
            verdict = self._orphans.decide(item, task, number, queue.get(task.job))
            if verdict == "cancel":
                self.logger.info(f"Cancelling job {task.job} of an earlier run: its shards have changed.")
                self._cancel([task])
            if verdict in ("wait", "cancel"):
                continue
            self._orphans.claimed.remove((item, task, number))
            if verdict == "adopt":
                self._wait_for(item, task, number)
            else:
                del task.waiting[number]
                item.again = True
                self._pending.jobs[item] = None
                batches.remove_if_done(task)

    def _report_trouble(self, command: str, trouble: str) -> None:
        """Warn when a problem with a command or job begins, and when it ends (`trouble` empty)."""
        if trouble != self._troubles.get(command, ""):
            self.logger.warning(trouble or f"{command} answers again.")
            self._troubles[command] = trouble


def _info(item: ShardJob, task: Task | None) -> SubmittedJobInfo:
    return SubmittedJobInfo(item.job, external_jobid=task.job if task else None)


def _jobs(task: Task) -> dict[int, ShardJob]:
    """The jobs of this run that are ready and wait for a task."""
    return {number: item for number, item in task.waiting.items() if item is not None}
