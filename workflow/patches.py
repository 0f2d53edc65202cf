"""Where this workflow needs another behaviour of Snakemake.

Three of its names are replaced, because 9.27.1, the newest release, has no public way:

- `FilePersistence`: the records of what each result was made with lie in RUN/records, with paths
  relative to the run, so that a run may be copied or renamed. The kernel locks a run, so that no
  lock outlives a killed Snakemake; meanwhile, bars show the progress of jobs, and Ctrl-C ends it
  with one line. Its other files are temporary: the working folder may be read-only. See
  `RunRecords`. `--persistence-backend` chooses from a closed list, and no option moves `.snakemake`
  without moving the working folder.
- `Job.remove_existing_output`, `Job.postprocess`: results of an earlier run stay until a job
  replaces them, because our commands write them whole or not at all. The flag `update` would copy
  each result first, and `--keep-incomplete` records a failed job as done.

The rest listens to the events of Snakemake's log, as its logger plugins do. See `_Events`.

- Before jobs start or are planned (-n), it refuses what a trained model could not go on with, and
  says what changed settings make them do again.
- `-n --quiet` prints the table of jobs.
- A terminal shows two files of a job's long list.
- A job that ends with exit code 2 is not tried again: its input or settings are wrong.
- A target that no rule makes is one line that names the closest one, and exit code 2.

At exit, the errors in the logs of failed jobs are printed last, whatever --quiet hides.
"""

import atexit
import base64
import json
import logging
import os
import re
import signal
import sys
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from itertools import product, starmap
from pathlib import Path
from threading import Event
from typing import Any

from snakemake.io import Mtime
from snakemake.logging import DefaultFormatter, logger
from snakemake.persistence import NO_PARAMS_CHANGE
from snakemake.persistence.file import FilePersistence
from snakemake.settings.enums import Quietness
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_logger_plugins.common import LogEvent

from cluster.corpus_jobs import dag_jobs
from common import steps
from common.console import fail, note, say
from common.errors import USER_ERROR, InputError, ToolkitError
from common.files import first_change, locked_run, read_json
from common.progress import Running, watch
from common.settings import Settings, closest
from workflow import redone, trained
from workflow.runs import is_copy, note_once, place

_RECORDS = "records"
_interrupted = Event()  # by Ctrl-C
_ERROR = re.compile(r"error: |[\w.]*(Error|Exception): ")
_NO_RULE = re.compile(r"^No rule to produce (.+) \(if you use input functions", re.MULTILINE)
_PATHS = re.compile(r"((?:[^\s,]*/[^\s,]*, ){2})((?:[^\s,]*/[^\s,]*, )+)[^\s,]*/[^\s,;]*")
_LISTS = re.compile(r"^ +(?:input|output|reason): .*", re.MULTILINE)  # of a job
_TAIL, _MOST = 65_536, 10  # bytes of a log that are searched, errors that are printed


def install(workflow: Any, settings: Settings) -> None:
    """Replace the names and listen to the log; called when the Snakefile is parsed."""
    import snakemake.workflow
    from snakemake.jobs import Job

    remove, finish = Job.remove_existing_output, Job.postprocess

    async def remove_existing_output(job: Any) -> None:
        if job.rule.name == "train":  # done.json says that it ended
            await remove(job)

    async def postprocess(job: Any, *arguments: Any, error: bool = False, **named: Any) -> None:
        if not error:  # it would remove the results of an earlier run
            await finish(job, *arguments, **named)

    snakemake.workflow.FilePersistence = partial(RunRecords, settings)
    Job.remove_existing_output, Job.postprocess = remove_existing_output, postprocess
    logger.addFilter(_Events(workflow, settings))
    for handler in logger.handlers:
        if handler.name == "DefaultStreamHandler" and handler.is_tty:  # the log file has all
            form: Any = handler.formatter
            handler.setFormatter(Abridged(form.quiet, form.show_failed_logs))
    atexit.register(print_errors, workflow)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


class _Events(logging.Filter):
    """Sees each event before it is printed."""

    def __init__(self, workflow: Any, settings: Settings) -> None:
        super().__init__()
        self._workflow = workflow
        # once: a dry run counts jobs twice
        self._announce, self._say = cache(partial(redone.announce, settings)), cache(say)
        self._check = cache(partial(trained.check_dag, settings))

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the event is printed; after Ctrl-C, errors are not."""
        event, workflow = getattr(record, "event", None), self._workflow
        if event == LogEvent.RUN_INFO:  # the DAG is complete, and no job has started
            if not workflow.touch:  # it keeps results as they are
                try:
                    self._check(workflow.dag)
                except (ToolkitError, OSError) as error:
                    sys.exit(fail(error))
            self._announce(workflow.dag)
            if workflow.dryrun and Quietness.PROGRESS in (workflow.output_settings.quiet or ()):
                self._say(record.getMessage())
        elif event == LogEvent.JOB_ERROR:  # logged while the error is handled; its cause is a CalledProcessError
            cause = getattr(sys.exc_info()[1], "__context__", None)
            if getattr(cause, "returncode", None) == USER_ERROR:
                running = {job.jobid: job for job in list(workflow.scheduler.running)}
                dag_jobs.give_up(running[vars(record)["jobid"]])
        elif event == LogEvent.ERROR and (target := _NO_RULE.search(record.getMessage())):
            known = (rule.name for rule in workflow.rules if not rule.has_wildcards())
            hint = closest(target[1], known)
            sys.exit(fail(InputError(f"no target {target[1]!r}{hint}; snakemake --list-target-rules lists them")))
        return not (_interrupted.is_set() and record.levelno >= logging.ERROR)


class Abridged(DefaultFormatter):  # type: ignore[misc]
    """Names two paths of a list: a phase of dedup has hundreds of files."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of an event."""
        text = str(super().format(record))
        if getattr(record, "event", None) not in (LogEvent.JOB_INFO, LogEvent.JOB_ERROR):
            return text
        return _LISTS.sub(lambda line: _PATHS.sub(_abridged, line[0]), text)


def _abridged(paths: re.Match[str]) -> str:
    return f"{paths[1]}… ({paths[2].count(', ') + 1} more)"


def error_in(logs: Iterator[str]) -> str:
    """The last error in the log of a job, with the log's path; empty if there is none."""
    for path in filter(os.path.isfile, logs):
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _TAIL))
            lines = file.read().decode("utf-8", "replace").splitlines()
        if errors := [line for line in lines if _ERROR.match(line)]:
            return f"error: {errors[-1].removeprefix('error: ')} ({path})"
    return ""


def print_errors(workflow: Any) -> None:
    """Print the errors of failed jobs to stderr, when Snakemake has said everything else."""
    failed = sorted(workflow.scheduler.failed, key=lambda job: job.jobid) if workflow.scheduler else ()
    lines = list(filter(None, (error_in(job.log) for job in failed)))[-_MOST:]
    print(*lines, sep="\n", end="\n" * bool(lines), file=sys.stderr)


class _Interrupt(SystemExit, KeyboardInterrupt):
    """Ctrl-C: for Snakemake a KeyboardInterrupt, for Python an exit without a traceback."""


def _interrupt(number: int, _frame: object) -> None:
    _interrupted.set()
    raise _Interrupt(128 + number)


class RunRecords(FilePersistence):  # type: ignore[misc]
    """Snakemake's records and lock of one run.

    A record has the name of its result's path in the run, and paths in it are relative. In a copied
    run, which the inode in run.json tells, the time of a result is that of its record. The inputs
    of `blacklist` and `ingest` are compared by content. A result without a record is made again.
    """

    _PARTS = (".pairs", ".edges")  # of dedup's work: their number changes no result

    def __init__(self, settings: Settings, **named: Any) -> None:
        super().__init__(**named | {"path": named["dag"].workflow.snakemake_tmp_dir / "persistence"})
        self._settings, self._inside = settings, f"{settings.run}/"
        self._metadata_path = str(settings.run / _RECORDS / "metadata")
        self._incomplete_path = str(settings.run / _RECORDS / "incomplete")
        self._max_len = 255  # instead of asking for that of a folder that does not exist yet
        self._change = cache(partial(changed_input, settings))
        if is_copy(settings.run):
            times = self.dag.workflow.iocache.mtime
            times.update((str(path), Mtime(local=time)) for path, time in recorded_times(settings.run))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the run until this process ends, and show the progress of jobs.

        Exits with one line if another process has the lock, the run is read-only, or after Ctrl-C.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked_run(self._settings.run))
            except (InputError, OSError) as error:
                sys.exit(fail(error))
            workflow = self.dag.workflow
            if not workflow.logger_manager.logfile_handlers:  # the working folder is read-only
                workflow.logger_manager.setup_logfile(workdir=self._settings.run)
            hidden = {Quietness.ALL, Quietness.PROGRESS} & set(workflow.output_settings.quiet or ())
            try:
                with nullcontext() if hidden else watch(partial(running_steps, self.dag)):
                    for handler in logger.handlers:
                        if getattr(handler, "stream", None) is sys.__stderr__:
                            handler.setStream(sys.stderr)  # the bars replace it
                    yield
            except (WorkflowError, _Interrupt) as error:
                if not _interrupted.is_set():
                    raise
                print("interrupted: finished steps are kept; rerun the same command to continue", file=sys.stderr)
                if isinstance(error, _Interrupt):  # the second one: threads still wait for slow jobs
                    os._exit(128 + signal.SIGINT)
                sys.exit(128 + signal.SIGINT)

    def _io_read(self, subject: Any, id: str) -> Any:
        with suppress(ValueError):  # not even text
            return super()._io_read(subject, id)
        return {}

    def _get_key(self, f: Any) -> str:
        return str(super()._get_key(f)).removeprefix(self._inside)

    def _input(self, job: Any) -> list[str]:
        return [str(path).removeprefix(self._inside) for path in super()._input(job)]

    def _params(self, job: Any) -> list[str]:
        return [text.replace(self._inside, "RUN/") for text in super()._params(job)]

    def params_changed(self, job: Any, file: Any = None) -> Any:
        """What differs, unless it is settings that mean the same in two versions of the toolkit."""
        change = super().params_changed(job, file)
        pairs = list(product(change.only_old, change.only_new))
        return NO_PARAMS_CHANGE if pairs and all(starmap(_mean_the_same, pairs)) else change

    def metadata(self, path: Any) -> Any:
        """The record of a file; none of a removed part, whose result has a record of its own."""
        return None if path.endswith(self._PARTS) and not os.path.exists(path) else super().metadata(path)

    def has_metadata(self, job: Any) -> bool:
        """True: Snakemake ignores other changes of a job if this is False."""
        return True

    def made_otherwise(self, job: Any) -> bool:
        """Whether a result of a job has a record, of other settings or inputs than the job's."""
        recorded = [path for path in job.output if self.metadata(path) is not None]
        return any(self.params_changed(job, path) or self._input_changed(job, path) for path in recorded)

    def _input_changed(self, job: Any, file: Any = None) -> bool:
        if self.metadata(file) is None:
            if not os.path.exists(file):
                return False
            note_once(
                f"{self._settings.run}: has results without a record of what they were made with, which will be made "
                "again; to keep them as they are, run the same command with --touch first"
            )
            return True
        before, now = (
            {name for name in names if not name.endswith(self._PARTS)} for names in (self.input(file), self._input(job))
        )
        return before != now or self._change(job.rule.name)


@cache
def _mean_the_same(then: str, now: str) -> bool:
    """Whether two recorded params are settings of a step that ask for the same result."""
    return then[0] == now[0] == "{" and not steps.changed(literal_eval(then), literal_eval(now))


def running_steps(dag: Any) -> list[Running]:
    """The steps that have running jobs, in the order of their names."""
    scheduler, running = dag.workflow.scheduler, dict[str, list[Path]]()
    for one in list(scheduler.running) if scheduler is not None else ():
        for job in one if one.is_group() else [one]:
            running.setdefault(job.rule.name, []).extend(map(Path, job.log))
    ended = Counter(job.rule.name for job in list(dag._finished) if job.rule.name in running)
    jobs = Counter(job.rule.name for job in list(dag._needrun) if job.rule.name in running)
    return [Running(name, ended[name], jobs[name], running[name]) for name in sorted(running)]


def changed_input(settings: Settings, rule: str) -> bool:
    """Whether the files that a rule read, by its statistics, have changed; prints which."""
    stats = steps.result(rule, settings.run) if rule in ("blacklist", "ingest") else None
    try:
        figures = read_json(stats, f"{rule} makes it again") if stats and stats.is_file() else {}
    except InputError as error:
        note(str(error))
        return True
    if "inputs" not in figures:
        return False
    read = figures["inputs"]
    names = place(settings.run)["names"]
    others = {path: facts for path, facts in read.items() if not any(map(Path(path).is_relative_to, names))}
    change = first_change(others, steps.read_by(rule, settings))
    if change is None and "listings" in figures:
        from corpus.remote.listing import read_listing  # takes half a second

        for source in settings.remote_sources:
            listing = read_listing(settings.fetch_folder, source)
            if listing and figures["listings"].get(source.key, listing.identity) != listing.identity:
                change = f"{source.path}: was listed again, with other files"
    if change:
        note(change)
    return change is not None


def recorded_times(run: Path) -> Iterator[tuple[Path, float]]:
    """(path, time) of each result of a run that has a record."""
    folder = run / _RECORDS / "metadata"
    for parent, _, names in os.walk(folder):
        for name in names:  # the path in base64; a long one is split into folders
            parts = (*Path(parent).relative_to(folder).parts, name)
            path = run / base64.urlsafe_b64decode("".join(part.removeprefix("@") for part in parts)).decode()
            with suppress(ValueError):  # damaged
                record = json.loads(Path(parent, name).read_bytes())
                if path.exists() and record["endtime"]:
                    yield path, record["endtime"]


def restore_times(run: Path) -> None:
    """Restore the times of the results of a copied run, so that later results are newer."""
    if is_copy(run):
        for path, time in recorded_times(run):
            os.utime(path, (time, time))
