"""Snakemake's executor for corpus jobs on Slurm: many shards in few sbatch calls, and no Snakemake inside a job.

    snakemake --profile slurm dataset
    snakemake --profile slurm -n dataset    # also prints what would be submitted

The DAG has one job per shard and step. This executor holds the jobs of a rule until all of them are ready
(`held_jobs`), packs them into the tasks of one job array (`batches`), and reports each shard by itself as soon as its
task has written the result. A shard's command runs directly in the task (`run_batch`).

Success and failure are read from the result files. squeue is asked once per interval for all arrays, and only to find
tasks that ended without finishing their list; sacct is never asked. What a Snakemake that died has left in Slurm is
adopted, or cancelled before the same shard runs again (`leftovers`).

All work is done in one thread: `run_jobs` only hands jobs over to it.
"""

import atexit
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.real import RealExecutor
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecMode, ExecutorSettingsBase

from cluster import slurm
from cluster.corpus_jobs import batches, reasons
from cluster.corpus_jobs.batch_table import print_plan
from cluster.corpus_jobs.batches import Request, Task
from cluster.corpus_jobs.dag_jobs import ShardJob, describe, request_of, resumes, site_of, unlimit_threads
from cluster.corpus_jobs.held_jobs import HeldJobs
from cluster.corpus_jobs.leftovers import Leftovers
from cluster.corpus_jobs.run_batch import forget_logs, keep_log
from cluster.slurm import RefusedError
from common import snakefile, snakemake_jobs
from common.errors import ConfigError, InputError, JobError, ToolkitError
from common.settings import Settings

POLL = 1.0  # seconds between two looks at the result files
SETTLE = 10.0  # seconds after which the results of an ended task are visible here; --latency-wait, if that is less
RETRY = 30.0  # seconds until sbatch is called again after a refusal that passes
_LOSSES = 3  # nodes that a shard may lose before it counts as failed
_TIME_LIMITS = 100  # jobs of a resumable shard that may reach their time limit before it counts as failed
_ATTEMPTS = 2  # tasks in a row that end before they start a shard, after which the shard fails
_LOST = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "REVOKED"})  # the shard that ran is not to blame

common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_envvar_declarations_to_cmd=True,
    auto_deploy_default_storage_provider=False,
)


@dataclass
class ExecutorSettings(ExecutorSettingsBase):  # type: ignore[misc]
    """No options of its own. Snakemake makes one if this executor was chosen, also for a dry run."""

    def __post_init__(self) -> None:
        atexit.register(print_plan)


class Executor(RealExecutor):  # type: ignore[misc]
    """The executor `slurm-batch`; see the module's docstring."""

    def __post_init__(self) -> None:
        if snakefile.parsed is None:
            raise WorkflowError("executor slurm-batch runs this toolkit's Snakefile only")
        self.settings: Settings = snakefile.parsed[1]
        unlimit_threads(self.workflow)
        needed = [job for job in self.dag.needrun_jobs() if not job.is_local]
        self._limits = slurm.time_limits()
        snakefile.check_before_jobs(self.workflow, lambda: self._check_time_limits(needed))
        self._held = HeldJobs(needed)
        self._leftovers = Leftovers(self.settings, needed)
        self._incoming: list[Any] = []
        self._open: dict[Task, dict[int, ShardJob]] = {}
        self._missing: dict[Task, float] = {}  # since when an open task is not in the queue
        self._next_queue = self._retry_at = 0.0
        self._troubles: dict[str, str] = {}
        self._array_limit = 0
        self._interval = float(self.workflow.remote_execution_settings.seconds_between_status_checks)
        self._settle = min(SETTLE, float(self.workflow.execution_settings.latency_wait))
        self._wake, self._lock, self._stopped = threading.Event(), threading.Lock(), False
        self._thread = threading.Thread(target=self._main, name="slurm-batch", daemon=True)
        self._thread.start()

    # What Snakemake calls, from its main thread.

    def run_jobs(self, jobs: list[Any]) -> None:
        """Take jobs that are ready."""
        for job in jobs:
            self.run_job_pre(job)
        with self._lock:
            self._incoming += jobs
        self._wake.set()

    def run_job(self, job: Any) -> None:
        """Take one job that is ready."""
        self.run_jobs([job])

    def shutdown(self) -> None:
        """Stop; called when nothing of ours is left, and after an error."""
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def cancel(self) -> None:
        """Cancel everything that was submitted; called after Ctrl-C."""
        self.shutdown()
        self._cancel(self._open)

    def get_exec_mode(self) -> ExecMode:
        """Unused: no Snakemake runs inside a job."""
        return ExecMode.REMOTE

    def get_python_executable(self) -> str:
        """Unused, see get_exec_mode."""
        return "python"

    @property
    def cores(self) -> str:
        """Unused, see get_exec_mode."""
        return "all"

    def _check_time_limits(self, needed: Iterable[Any]) -> None:
        """Raise ConfigError if Slurm would refuse a rule's time limit, perhaps after days of other rules."""
        over = {}
        for rule, job in {job.rule.name: job for job in needed}.items():
            asked = request_of(job, self.settings.cluster)
            if asked != (most := self._within_limit(asked)):
                over[reasons.time_limit(rule)] = f"({asked.minutes}, at most {most.minutes})"
        if over:
            shown = ", ".join(f"{key} {limits}" for key, limits in over.items())
            raise ConfigError(f"over MaxTime of the partition: {shown}; lower them, or change cluster.corpus.partition")

    def _within_limit(self, request: Request) -> Request:
        """The request, with at most its partition's MaxTime."""
        site = site_of(self.settings, request)
        if site.qos or re.search("--(qos|partition|time)=", " ".join(site.sbatch)):  # a QOS may allow more
            return request
        names = (os.environ.get("SBATCH_PARTITION") or site.partition).split(",")
        longest = max(self._limits.get(name, math.inf) for name in names)
        return request if (request.minutes or 0) <= longest else replace(request, minutes=int(longest))

    # The thread.

    def _main(self) -> None:
        try:
            while not self._stopped:
                self._step()
                self._wake.wait(max(POLL, len(self._open) / 100))  # at most 100 files per second
                self._wake.clear()
        except Exception as error:
            cured = WorkflowError(str(error)) if isinstance(error, ToolkitError) else error
            self.workflow.scheduler.executor_error_callback(cured)

    def _step(self) -> None:
        with self._lock:
            incoming, self._incoming = self._incoming, []
        for job in incoming:
            item = describe(job, self.settings.cluster)
            item.request = self._within_limit(item.request)
            if not self._leftovers.claims(item):
                self._held.add(item)
        self._read_results()
        if time.monotonic() >= self._next_queue and (self._open or self._leftovers.claimed):
            self._next_queue = time.monotonic() + self._interval
            self._look_at_queue()
        if time.monotonic() >= self._retry_at:
            busy = bool(self._open or self._leftovers.claimed)
            self._submit_all(self._held.ready(busy, self._count_running))

    def _count_running(self) -> int:
        return sum(not job.is_local for job in list(self.workflow.scheduler.running))

    # Submitting.

    def _submit_all(self, ready: Sequence[ShardJob]) -> None:
        """Submit jobs, those with equal requests together."""
        groups: dict[Request, list[ShardJob]] = {}
        for item in sorted(ready, key=lambda item: (item.shard.rule, item.shard.label)):
            groups.setdefault(item.request, []).append(item)
        corpus = self.settings.cluster.corpus
        for request, members in groups.items():
            limit = min(corpus.max_tasks, self._largest_array()) if len(members) > 1 else 1
            whole = [item for item in members if self._prepare(item)]
            for parts in batches.split(len(whole), corpus.shards_per_job, limit):
                if not self._submit(request, whole, parts):
                    return
        self._say("sbatch", "")

    def _largest_array(self) -> int:
        """The site's limit on the number of tasks of one array."""
        if not self._array_limit:
            self._array_limit = slurm.max_array_size()
        return self._array_limit

    def _prepare(self, item: ShardJob) -> bool:
        """Make the folders of a job's outputs, and remove old logs."""
        for log in item.shard.logs:
            if item.again:
                keep_log(log)
            else:
                forget_logs(log)
        try:
            self.workflow.async_run(item.job.prepare())
        except (WorkflowError, OSError) as error:
            self._held.remove(item)
            self._fail([item], f"cannot be submitted: {error}")
            return False
        return True

    def _submit(self, request: Request, members: Sequence[ShardJob], parts: Sequence[range]) -> bool:
        """Submit a batch, in halves if it is more than the user may have queued; returns whether Slurm took it all."""
        run, site = self.settings.run, site_of(self.settings, request)
        rules = [members[number].shard.rule for part in parts for number in part]
        tasks = batches.write_batch(run, [item.shard for item in members], parts, request, site)
        try:
            job = slurm.submit(tasks[0].folder / "batch.sh", time_limit=reasons.time_limit(rules[0]))
        except InputError as error:
            batches.remove(tasks[0].folder)  # if Slurm has accepted it after all, its tasks end at once
            name = batches.title(rules)
            if not isinstance(error, RefusedError) or not error.passes:
                raise InputError(f"{name}: {error}") from None
            if error.too_many and len(parts) > 1:
                middle = len(parts) // 2
                return all(self._submit(request, members, half) for half in (parts[:middle], parts[middle:]))
            self._say("sbatch", f"{name}: Slurm refused the job: {error.reason}; trying again every {RETRY:.0f} s")
            self._retry_at = time.monotonic() + RETRY
            return False
        batches.accepted(tasks, job)
        for task, part in zip(tasks, parts, strict=True):
            self._open[task] = dict(enumerate(members[number] for number in part))
            for item in self._open[task].values():
                self._held.remove(item)
                item.again = True
                self.report_job_submission(SubmittedJobInfo(item.job, external_jobid=task.job))
        self._next_queue = time.monotonic() + self._interval
        return True

    # Results.

    def _read_results(self) -> None:
        for task, jobs in list(self._open.items()):
            task.read()
            for number in [number for number in jobs if number in task.ended]:
                item, result = jobs.pop(number), task.ended[number]
                self._held.news()
                if result["exit"]:
                    retry = result["exit"] != snakemake_jobs.BAD_INPUT
                    self._fail([item], reasons.of_shard(result, item.request), task, retry=retry)
                else:
                    self.report_job_success(SubmittedJobInfo(item.job, external_jobid=task.job))
            if not jobs:
                self._close(task)

    def _close(self, task: Task) -> None:
        """Forget a task whose shards have all been reported."""
        del self._open[task]
        if self._missing.pop(task, None) is not None:
            self._leftovers.forget(task)
        if len(task.ended) == len(task.shards) and not any(result["exit"] for result in task.ended.values()):
            task.log.unlink(missing_ok=True)
        self._remove_if_done(task.folder)

    def _remove_if_done(self, folder: Path) -> None:
        """Remove the files of a batch that nobody needs any more."""
        if not any(task.folder == folder for task in self._open) and self._leftovers.done_with(folder):
            batches.remove(folder)

    def _fail(self, members: Sequence[ShardJob], reason: str, task: Task | None = None, *, retry: bool = True) -> None:
        """Report jobs as failed; the reason is printed once. Without `retry`, Snakemake does not start them again."""
        for number, item in enumerate(members):
            if not retry:
                snakemake_jobs.give_up(item.job)
            info = SubmittedJobInfo(item.job, external_jobid=task.job if task else None)
            if number:
                self.workflow.scheduler.error_callback(item.job)
            else:
                others = f" (and {len(members) - 1} others of this task)" if len(members) > 1 else ""
                said = reasons.last_words(task.log) if task else ""
                self.report_job_error(
                    info, msg=f"{reason}{others}{said}", aux_logs=[str(task.log)] if task and said else []
                )

    # The queue.

    def _look_at_queue(self) -> None:
        """Find tasks that ended without finishing their list, and decide about what another Snakemake left."""
        tasks = {*self._open, *self._leftovers.tasks()}
        found = slurm.queue({task.job.split("_")[0] for task in tasks if task.job})
        if found is None:
            self._say("squeue", "Slurm's controller does not answer; waiting for it")
            return
        self._say("squeue", "")
        queue = {job.id: job for job in found}
        self._settle_leftovers(queue)
        for task in list(self._open):
            job = queue.get(task.job)
            if job is not None and job.hopeless:
                key = reasons.time_limit(task.shards[0].rule)
                self._end(task, f"job {task.job}: {slurm.never_starts(job, key)}", retry=False)
            elif job is not None and job.active:
                self._missing.pop(task, None)
            elif time.monotonic() >= self._missing.setdefault(task, time.monotonic()) + self._settle:
                self._read_results()
                if task in self._open:
                    self._judge(task, job.state if job else "")
        if self._missing:
            self._next_queue = min(self._next_queue, time.monotonic() + self._settle)

    def _judge(self, task: Task, state: str) -> None:
        """Decide about the shards of a task that ended early: the one that ran, and those that had not started."""
        where = f"Slurm's job {task.job} ended ({state or 'unknown to Slurm by now'})"
        if state == "CANCELLED":
            self._end(task, f"{where}: somebody cancelled it", retry=False)
            return
        jobs = self._open[task]
        if task.running in jobs and self._is_to_blame(jobs[task.running], task, state):
            self._fail([jobs.pop(task.running)], reasons.of_task(where, state, task), task)
        idle = not task.started
        for item in jobs.values():
            item.idle_tasks = item.idle_tasks + 1 if idle else 0
        hopeless = [item for item in jobs.values() if item.idle_tasks >= _ATTEMPTS]
        if hopeless:
            self._fail(hopeless, f"{where} before it started any shard, {_ATTEMPTS} times in a row", task, retry=False)
        self._held.return_all(item for item in jobs.values() if item.idle_tasks < _ATTEMPTS)
        jobs.clear()
        self._close(task)

    def _is_to_blame(self, item: ShardJob, task: Task, state: str) -> bool:
        """Whether the shard that ran when its task ended counts as failed."""
        if state in ("TIMEOUT", "DEADLINE"):
            item.time_limits += 1
            return task.alone and not (resumes(item.job) and item.time_limits <= _TIME_LIMITS)
        item.losses += state in _LOST
        return state not in _LOST or item.losses > _LOSSES

    def _end(self, task: Task, reason: str, *, retry: bool) -> None:
        """Give up a task: cancel what Slurm still has of it, and report its shards as failed."""
        members = list(self._open[task].values())
        self._cancel([task])
        self._fail(members, reason, task, retry=retry)
        self._open[task].clear()
        self._close(task)

    def _cancel(self, tasks: Iterable[Task]) -> None:
        """Cancel tasks in Slurm; they start nothing more, whether Slurm answers or not."""
        chosen = list(tasks)
        for task in chosen:
            task.abandon()
        others = {task.folder for task in self._open if task not in chosen}
        # a whole array by its own id: a command line of thousands of tasks would be too long
        jobs = sorted({task.job if task.folder in others else task.job.split("_")[0] for task in chosen if task.job})
        try:
            if jobs:
                slurm.cancel(jobs)
        except (JobError, InputError) as error:
            self.logger.warning(f"{error}; the jobs end by themselves before their next shard")

    def _settle_leftovers(self, queue: dict[str, slurm.QueuedJob]) -> None:
        """Adopt, cancel or repeat what a Snakemake that died has left of the jobs that are ready now."""
        for item, task, number in list(self._leftovers.claimed):
            verdict = self._leftovers.judge(item, task, number, queue.get(task.job))
            if verdict == "wait":
                continue
            if verdict == "cancel":
                self.logger.info(f"Cancelling job {task.job} of an earlier run: it does something else by now.")
                self._cancel([task])
                continue
            self._leftovers.release(item, task, number)
            item.again = True
            if verdict == "adopt":
                self._held.adopt(item)
                self._open.setdefault(task, {})[number] = item
                self.report_job_submission(SubmittedJobInfo(item.job, external_jobid=task.job))
            else:
                self._held.add(item)
                self._remove_if_done(task.folder)

    def _say(self, command: str, trouble: str) -> None:
        """Tell about a trouble with a command of Slurm when it begins, and when it has passed (empty)."""
        before = self._troubles.get(command, "")
        if trouble and trouble != before:
            self.logger.warning(trouble)
        elif before and not trouble:
            self.logger.info(f"{command} answers again.")
        self._troubles[command] = trouble
