"""A Slurm without daemons, for `make test`: sbatch, squeue, scancel, scontrol and srun, answered by
the test's process.

Jobs get the ids 1000, 1001, …; the tasks of an array (`--array=0-3`) are jobs 1000_0, 1000_1, …. A
job starts with the environment of its sbatch. The texts are those of Slurm 22.05. The commands are
bash scripts that ask a thread of this process, which takes milliseconds; a Python for each would
take tens.
"""

import os
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)  # the last line of sbatch's errors, whatever the limit
# a descriptor of 10 or more: smaller ones may be inherited, such as the lock of cluster.submit
# The user's variables would change what Slurm's commands do: see `slurm.environment`.
_CLIENT = """#!/bin/bash
[[ {name} = srun || -z "${{!SQUEUE_*}}${{SBATCH_EXPORT-}}${{SLURM_TIME_FORMAT-}}" ]] || exit 99
exec {{asked}}<>/dev/tcp/127.0.0.1/{port} || exit 1
printf '%s\\0' $# $$ {name} "$@" >&$asked
for part in code out errors; do IFS= read -r -d '' $part <&$asked; done
printf %s "$out"
printf %s "$errors" >&2
exit ${{code:-1}}
"""
_OLD = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY")
_SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
_NO_NODE = "Batch job submission failed: Requested node configuration is not available"
_UNKNOWN = "slurm_load_jobs error: Invalid job id specified"

Answer = tuple[int, str, str]  # exit code, output and errors of a command


@dataclass(frozen=True)
class FakeJob:
    """A job, or one task of an array."""

    id: str
    name: str
    options: Sequence[str] = ()
    script: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    state: str = "PENDING"
    reason: str = "None"
    nodes: str = ""
    restarts: int = 0

    @property
    def asked(self) -> dict[str, str]:
        """Its options by name."""
        return dict(option.removeprefix("--").partition("=")[::2] for option in self.options)


@dataclass(frozen=True)
class _Behaviour:
    """See `FakeSlurm.behave`."""

    silent: bool = False
    meanwhile: Callable[[str], object] = bool
    refuses: str = ""
    most: int = 1000
    holds: str = ""
    stays: Mapping[str, str] = field(default_factory=dict)
    exit_code: int = 0
    prints: str = "{}"


class FakeSlurm:
    """The jobs, how the commands behave, and what was called."""

    def __init__(self, folder: Path) -> None:
        self.runs = False  # whether jobs that are submitted from now on run
        self.nodes = ""  # what scontrol says of the nodes
        self.names = ["node1"]  # a job runs on the first one that it does not exclude
        self.config = "PrivateData             = none\n"  # what scontrol says of the configuration
        self._bin = folder / "bin"
        self._jobs: dict[str, FakeJob] = {}
        self._calls: list[list[str]] = []
        self._behaviour, self._changed = _Behaviour(), threading.Event()
        self._lock = threading.RLock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._workers: list[threading.Thread] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        self._bin.mkdir(parents=True)
        for name in COMMANDS:
            script = self._bin / name
            script.write_text(_CLIENT.format(port=self._server.getsockname()[1], name=name))
            script.chmod(0o755)

    def close(self) -> None:
        """End the jobs that run, and the commands."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.behave(silent=True)
        for number in list(self._processes):
            self.end(number, "CANCELLED")

    @property
    def path(self) -> str:
        """PATH with these commands first."""
        return f"{self._bin}{os.pathsep}{os.environ['PATH']}"

    def behave(self, **values: Any) -> None:
        """Change how the commands behave from now on; what is left out is as usual. An sbatch that
        is held goes on.

        silent: the controller cannot be reached; meanwhile: is called with the name of each command
        before it does anything; refuses: sbatch fails with these lines; most: jobs that a user may
        have (MaxSubmit); holds: sbatch hangs "before" or "after" the job is in the queue; stays:
        why jobs stay pending, by name; exit_code: that of srun; prints: sbatch's output, {} is the
        id.
        """
        changed, self._changed = self._changed, threading.Event()
        self._behaviour = _Behaviour(**values)
        changed.set()

    def jobs(self) -> list[FakeJob]:
        """All jobs, oldest first."""
        return list(self._jobs.values())

    def job(self, number: str) -> FakeJob:
        """The job with an id."""
        return self._jobs[number]

    def batches(self) -> list[FakeJob]:
        """The first job of each call of sbatch."""
        return [job for job in self.jobs() if job.id.partition("_")[2] in ("", "0")]

    def add(self, name: str, **values: Any) -> FakeJob:
        """Put a job into the queue that nobody submitted with sbatch."""
        with self._lock:
            new = FakeJob(str(self._next()), name, **values)
            self._jobs[new.id] = new
        return new

    def change(self, number: str, **values: Any) -> FakeJob:
        """Change fields of a job, such as state and reason."""
        with self._lock:
            self._jobs[number] = replace(self._jobs[number], **values)
        return self._jobs[number]

    def forget(self, number: str) -> None:
        """Remove a job, as the controller does MinJobAge seconds after its end."""
        del self._jobs[number]

    def calls(self, command: str = "") -> list[list[str]]:
        """The command lines so far, or those of one command."""
        return [line for line in self._calls if not command or line[0] == command]

    def end(self, number: str, state: str) -> None:
        """kill -9 all processes of a job that runs; squeue shows `state` from then on."""
        self.change(number, state=state)
        with suppress(psutil.NoSuchProcess, KeyError):
            process = psutil.Process(self._processes[number].pid)
            for member in [process, *process.children(recursive=True)]:
                member.kill()
        for worker in self._workers:
            if worker.name == number:
                worker.join()

    def run(self, number: str, exit_code: int = 0) -> "subprocess.CompletedProcess[str]":
        """Run the batch script of a job whose srun ends with `exit_code`; its state is left as it
        is.
        """
        job = self.job(number)
        self.behave(exit_code=exit_code)
        environment = {**os.environ, "PATH": self.path, "SLURM_JOB_ID": job.id}
        if job.restarts:
            environment["SLURM_RESTART_COUNT"] = str(job.restarts)
        command = ["bash", "-c", job.script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def _next(self) -> int:
        return max([int(key.partition("_")[0]) for key in self._jobs], default=999) + 1

    # the commands

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # whoever asked was killed
            data = b""
            while not (words := data.split(b"\0"))[0] or len(words) < int(words[0]) + 4:
                if not (more := connection.recv(65536)):
                    return
                data += more
            pid, command, *arguments = [word.decode() for word in words[1:-1]]
            self._calls.append([command, *arguments])
            answer = self._answer(command, arguments, pid)
            connection.sendall("".join(f"{part}\0" for part in answer).encode())

    def _answer(self, command: str, arguments: list[str], pid: str) -> Answer:
        script = Path(arguments[-1]).read_text() if command == "sbatch" else ""
        self._behaviour.meanwhile(command)
        behaviour, changed = self._behaviour, self._changed
        if behaviour.silent and command != "srun":
            return 1, "", f"{_SILENT}\n"
        if command == "srun":
            return behaviour.exit_code, "", ""
        if command != "sbatch":
            with self._lock:
                return getattr(self, f"_{command}")(arguments)  # type: ignore[no-any-return]
        environment = psutil.Process(int(pid)).environ()
        if behaviour.holds == "before":
            changed.wait()
        answer = self._sbatch(script, environment, behaviour)
        if behaviour.holds == "after":
            changed.wait()
        return answer

    def _sbatch(self, script: str, environment: dict[str, str], behaviour: _Behaviour) -> Answer:
        lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
        new = FakeJob("", "sbatch", shlex.split(" ".join(lines)), script, environment)
        new = replace(new, name=new.asked.get("job-name", "sbatch"))
        stays = behaviour.stays.get(new.name)
        last = new.asked.get("array", "").rpartition("-")[2].partition("%")[0]
        if behaviour.refuses:
            return 1, "", "".join(f"sbatch: error: {line}\n" for line in behaviour.refuses.splitlines())
        with self._lock:
            number, alive = self._next(), sum(job.state not in _OLD for job in self.jobs())
            ids = [f"{number}_{index}" for index in range(int(last) + 1)] if last else [str(number)]
            if not self._node(new):
                return 1, "", f"sbatch: error: {_NO_NODE}\n"
            if alive + len(ids) > behaviour.most:
                return 1, "", f"sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: {POLICY}\n"
            for one in ids:
                self._jobs[one] = replace(new, id=one, reason=stays or "None")
            for one in ids if self.runs and not stays else []:
                self._workers.append(threading.Thread(target=self._work, args=(one,), name=one))
                self._workers[-1].start()
        return 0, behaviour.prints.format(number) + "\n", ""

    def _node(self, job: FakeJob) -> str:
        """The node for a job; empty if there is none."""
        return next((name for name in self.names if name not in job.asked.get("exclude", "").split(",")), "")

    def _work(self, number: str) -> None:
        """Run a job to its end."""
        job, (array, _, index) = self.job(number), number.partition("_")
        environment = {**job.environment, "SLURM_JOB_ID": number.replace("_", "00"), "SLURM_JOB_NAME": job.name}
        environment["SLURMD_NODENAME"] = node = self._node(job)
        if index:
            environment |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": index}
        log = job.asked["output"].replace("%a", index).replace("%%", "%")
        with open(log, "ab") as output, self._lock:
            if self.job(number).state != "PENDING":  # cancelled
                return
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            options: Any = {"env": environment, "cwd": job.asked["chdir"], "start_new_session": True, **streams}
            self._processes[number] = process = subprocess.Popen(["bash", "-c", job.script], **options)
            self.change(number, state="RUNNING", nodes=node)
        code = process.wait()
        with self._lock:
            del self._processes[number]
            ends = {"RUNNING": "FAILED" if code else "COMPLETED", "COMPLETING": "CANCELLED"}
            state = self.job(number).state
            self.change(number, state=ends.get(state, state))

    def _squeue(self, arguments: list[str]) -> Answer:
        asked = dict(word.removeprefix("--").partition("=")[::2] for word in arguments)
        if (asked["states"], asked["format"]) != ("all", "%i|%T|%r|%N|%j"):
            return 1, "", "this squeue knows one format\n"
        ids = asked.get("jobs", "").split(",")
        jobs = [job for job in self.jobs() if job.name == asked.get("name", job.name)]
        if "jobs" in asked:
            jobs = [job for job in jobs if {job.id, job.id.partition("_")[0]} & set(ids)]
            if not jobs and len(ids) == 1:
                return 1, "", f"{_UNKNOWN}\n"
        rows = ("|".join([job.id, job.state, job.reason, job.nodes, job.name]) for job in jobs)
        return 0, "".join(f"{row}\n" for row in rows), ""

    def _scancel(self, arguments: list[str]) -> Answer:
        for job in self.jobs():
            if {job.id, job.id.partition("_")[0]} & set(arguments) and job.state not in _OLD:
                running = self._processes.get(job.id)
                self.change(job.id, state="COMPLETING" if running else "CANCELLED", reason="None")
                if running:
                    running.send_signal(signal.SIGTERM)
        return 0, "", ""

    def _scontrol(self, arguments: list[str]) -> Answer:
        *_, verb, number = arguments
        if arguments[0] == "update":
            number = arguments[1].removeprefix("JobId=")
            self.change(number, options=[*self.job(number).options, arguments[2].replace("NumNodes", "--nodes")])
            return 0, "", ""
        if verb == "show" and number in ("node", "config"):
            return 0, self.nodes if number == "node" else self.config, ""
        if number not in self._jobs:
            return 1, "", f"{_UNKNOWN}\n"
        job = self.job(number)
        if verb == "requeue":
            if job.state == "PENDING" or "--no-requeue" in job.options:
                return 1, "", f"Requested operation is presently disabled for job {number}\n"
            self.change(number, state="PENDING", reason="BeginTime", nodes="", restarts=job.restarts + 1)
            return 0, "", ""
        shown = {"JobId": job.id, "JobName": job.name, "JobState": job.state, "Reason": job.reason}
        shown |= {"Requeue": str(int("--no-requeue" not in job.options)), "Restarts": str(job.restarts)}
        shown |= {"NumNodes": str(job.nodes.count(",") + 1), "Partition": job.asked.get("partition", "main")}
        return 0, " ".join(f"{key}={value}" for key, value in shown.items()) + "\n", ""
