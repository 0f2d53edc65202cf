"""A Slurm without daemons: sbatch, squeue, scancel, scontrol and srun as scripts over a folder of jobs.

    fake = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", fake.path)
    ...                                            # something calls sbatch
    fake.change("1000", state="RUNNING")           # jobs run only if a test says so
    assert fake.calls("sbatch") and fake.job("1000").name == "tiny"

Jobs get the ids 1000, 1001, …; the tasks of an array (`--array=0-3%2`) are jobs 1000_0, 1000_1, …. A job changes its
state only through a test, `scancel` or `scontrol requeue`. The texts are those of Slurm 22.05.
"""

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
_OLD = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY")
_SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@dataclass(frozen=True)
class FakeJob:
    """A job, or one task of an array."""

    id: str
    name: str
    options: list[str]
    """sbatch's options: those of the script's directives, then those of the command line."""
    script: str
    state: str = "PENDING"
    reason: str = "None"
    nodes: str = ""
    restarts: int = 0
    details: dict[str, str] = field(default_factory=dict)
    """Further keys of `scontrol show job`."""


class FakeSlurm:
    """The jobs, how the commands behave, and what was called; everything is in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin = folder / "bin"
        if self._bin.is_dir():
            return
        self._bin.mkdir(parents=True)
        self._write({})
        self.behave()
        for name in COMMANDS:
            script = self._bin / name
            call = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(folder), name])
            script.write_text(f'#!/bin/sh\nexec {call} "$@"\n')
            script.chmod(0o755)

    @property
    def path(self) -> str:
        """PATH with these commands first."""
        return f"{self._bin}{os.pathsep}{os.environ['PATH']}"

    def behave(
        self,
        *,
        silent: bool = False,
        hangs: float = 0,
        refuses: str = "",
        no_requeue: bool = False,
        before: float = 0,
        after: float = 0,
        exit_code: int = 0,
        prints: str = "",
    ) -> None:
        """Change how the commands behave from now on; what is left out is as usual.

        silent: the controller cannot be reached; hangs: every command takes this many seconds before it does anything;
        refuses: sbatch fails with this text; no_requeue: scontrol requeue fails; before, after: seconds that sbatch
        takes before and after the job is in the queue; exit_code: that of srun; prints: sbatch's output, {} is the id.
        """
        values = {key: value for key, value in locals().items() if key != "self"}
        (self.folder / "behaviour.json").write_text(json.dumps(values))

    def jobs(self) -> list[FakeJob]:
        """All jobs, oldest first."""
        return list(self._read().values())

    def job(self, number: str) -> FakeJob:
        """The job with an id."""
        return self._read()[number]

    def add(self, name: str, **values: Any) -> FakeJob:
        """Put a job into the queue that nobody submitted with sbatch."""
        with self._locked():
            jobs = self._read()
            new = FakeJob(str(self._next(jobs)), name, [], "", **values)
            self._write({**jobs, new.id: new})
        return new

    def change(self, number: str, **values: Any) -> FakeJob:
        """Change fields of a job, such as state and reason."""
        with self._locked():
            jobs = self._read()
            jobs[number] = replace(jobs[number], **values)
            self._write(jobs)
        return jobs[number]

    def forget(self, number: str) -> None:
        """Remove a job, as the controller does MinJobAge seconds after its end."""
        with self._locked():
            self._write({key: job for key, job in self._read().items() if key != number})

    def calls(self, command: str = "") -> list[list[str]]:
        """The command lines so far, or those of one command."""
        log = self.folder / "calls"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [line for line in lines if not command or line[0] == command]

    def run(self, number: str, exit_code: int = 0) -> "subprocess.CompletedProcess[str]":
        """Run the batch script of a job whose srun ends with `exit_code`; its state is left as it is."""
        job = self.job(number)
        self.behave(exit_code=exit_code)
        environment = {**os.environ, "PATH": self.path, "SLURM_JOB_ID": job.id}
        if job.restarts:
            environment["SLURM_RESTART_COUNT"] = str(job.restarts)
        command = ["bash", "-c", job.script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> dict[str, FakeJob]:
        rows = json.loads((self.folder / "jobs.json").read_text())
        return {row["id"]: FakeJob(**row) for row in rows}

    def _write(self, jobs: dict[str, FakeJob]) -> None:
        new = self.folder / f"jobs.{os.getpid()}"
        new.write_text(json.dumps([asdict(job) for job in jobs.values()], indent=1))
        new.replace(self.folder / "jobs.json")

    @staticmethod
    def _next(jobs: dict[str, FakeJob]) -> int:
        return max([int(key.split("_")[0]) for key in jobs], default=999) + 1

    # the commands: each returns its exit code

    def call(self, command: str, arguments: list[str]) -> int:
        """What a command does; the scripts in PATH call this."""
        behaviour = json.loads((self.folder / "behaviour.json").read_text())
        with self._locked(), (self.folder / "calls").open("a") as log:
            log.write(json.dumps([command, *arguments]) + "\n")
        time.sleep(behaviour["hangs"])
        if behaviour["silent"] and command != "srun":
            return _fail(_SILENT)
        if command == "srun":
            return int(behaviour["exit_code"])
        if command == "sbatch":
            return self._sbatch(arguments, behaviour)
        with self._locked():
            if command == "squeue":
                return self._squeue(arguments)
            if command == "scancel":
                return self._scancel(arguments)
            return self._scontrol(arguments, behaviour)

    def _sbatch(self, arguments: list[str], behaviour: dict[str, Any]) -> int:
        if behaviour["refuses"]:
            return _fail(f"sbatch: error: Batch job submission failed: {behaviour['refuses']}")
        time.sleep(behaviour["before"])
        files = [word for word in arguments if not word.startswith("-") and Path(word).is_file()]
        wrapped = _option(arguments, "--wrap")
        script = f"#!/bin/sh\n{wrapped}\n"
        if not wrapped:
            script = Path(files[0]).read_text() if files else sys.stdin.read()
        directives = [line[8:] for line in script.splitlines() if line.startswith("#SBATCH ")]
        options = [*shlex.split(" ".join(directives)), *(word for word in arguments if word not in files)]
        name = _option(options, "--job-name", "-J") or "sbatch"
        with self._locked():
            jobs = self._read()
            number = self._next(jobs)
            array = _option(options, "--array", "-a")
            ids = [f"{number}_{index}" for index in _indices(array)] if array else [str(number)]
            for one in ids:
                jobs[one] = FakeJob(one, name, options, script)
            self._write(jobs)
        time.sleep(behaviour["after"])
        print(behaviour["prints"].format(number) or number)
        return 0

    def _squeue(self, arguments: list[str]) -> int:
        asked, name = _option(arguments, "--jobs", "-j"), _option(arguments, "--name", "-n")
        states = (_option(arguments, "--states", "-t") or "").upper()
        jobs = [job for job in self._read().values() if not name or job.name in name.split(",")]
        if asked:
            ids = asked.split(",")
            jobs = [job for job in jobs if job.id in ids or job.id.split("_")[0] in ids]
            if not jobs and len(ids) == 1:
                return _fail("slurm_load_jobs error: Invalid job id specified")
        if states != "ALL":
            jobs = [job for job in jobs if (job.state in states.split(",") if states else job.state not in _OLD)]
        form = _option(arguments, "--format", "-o") or "%i|%j|%T|%r|%N"
        if not {"--noheader", "-h"} & set(arguments):
            print(re.sub(r"%\.?\d*(\w)", lambda match: match[1].upper(), form))
        for job in jobs:
            values = {"i": job.id, "j": job.name, "T": job.state, "r": job.reason, "N": job.nodes, "u": "user"}
            values |= {"A": job.id.split("_")[0], "F": job.id.split("_")[0], "K": job.id.partition("_")[2] or "N/A"}
            print(re.sub(r"%\.?\d*(\w)", lambda match, values=values: values.get(match[1], ""), form))  # type: ignore[misc]
        return 0

    def _scancel(self, arguments: list[str]) -> int:
        ids = [word for word in arguments if not word.startswith("-")]
        signalled = any(word.startswith(("--signal", "-s")) for word in arguments)
        jobs = self._read()
        for job in list(jobs.values()):
            if (job.id in ids or job.id.split("_")[0] in ids) and job.state not in _OLD and not signalled:
                jobs[job.id] = replace(job, state="CANCELLED", reason="None")
        self._write(jobs)
        return 0

    def _scontrol(self, arguments: list[str], behaviour: dict[str, Any]) -> int:
        verb, number, jobs = arguments[-2], arguments[-1], self._read()
        if number not in jobs:
            return _fail("slurm_load_jobs error: Invalid job id specified")
        job = jobs[number]
        if verb == "requeue":
            if behaviour["no_requeue"] or job.state == "PENDING":
                return _fail(f"Requested operation is presently disabled for job {number}")
            jobs[number] = replace(job, state="PENDING", reason="BeginTime", nodes="", restarts=job.restarts + 1)
            self._write(jobs)
            return 0
        shown = {
            "JobId": job.id,
            "JobName": job.name,
            "JobState": job.state,
            "Reason": job.reason,
            "Requeue": "1",
            "Restarts": str(job.restarts),
            **job.details,
        }
        print(" ".join(f"{key}={value}" for key, value in shown.items()))
        return 0


def _fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


def _option(words: Sequence[str], *names: str) -> str:
    """The value of the last `--name=value` or `--name value`; empty if there is none."""
    value = ""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word in names:
            value = following
        elif word.partition("=")[0] in names:
            value = word.partition("=")[2]
    return value


def _indices(array: str) -> list[int]:
    """0-2,5%3 is [0, 1, 2, 5]."""
    indices = []
    for part in array.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        indices += range(int(first), int(last or first) + 1)
    return indices


if __name__ == "__main__":
    sys.exit(FakeSlurm(Path(sys.argv[1])).call(sys.argv[2], sys.argv[3:]))
