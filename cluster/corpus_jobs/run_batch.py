"""Runs the shards of one Slurm task in turn; a result is on disk before the next shard starts.

    python -IS run_batch.py FOLDER     # inside a Slurm job

FOLDER/INDEX.json lists the shards of task INDEX; FOLDER/INDEX.results receives one JSON line per
event:

    {"begin": RESTARTS, "job": ID}   a Slurm job started, or started again, on this list
    {"start": I, "time": T}          shard I starts; it sees inputs as they were at T
    {"unstarted": I}                 it did not: this node has no shell, process or memory left
    {"end": I, "exit": CODE, "seconds": S, "max_rss_mb": M}
                                     shard I ended; a negative code is a signal
    {"left": RESTARTS}               this start ends early, and none of its commands runs

A requeued task skips shards that have ended. A shard that fails does not stop the others. SIGTERM
(time limit, preemption, scancel) is passed on to the running command, and what has not ended stays
unrecorded. A task leaves quietly if a newer one works on the same list, or if the file
FOLDER/INDEX.abandoned exists.

The file needs only the standard library: a copy of it lies in FOLDER, so that edited code never
changes the runner of a queued job.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

WATCH = 5.0  # seconds between two checks whether this task is still wanted
GRACE = 1.0  # seconds by which Slurm's SIGTERM may reach a command before it reaches this process
TAKEOVER = 3 * WATCH  # seconds in which an older copy of a requeued task notices the new one and leaves
_LONGEST_ARGUMENT = 100_000  # bytes; the kernel allows 131,072
_THREADS = (
    "OMP_NUM_THREADS GOTO_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS VECLIB_MAXIMUM_THREADS NUMEXPR_NUM_THREADS"
).split()


def read_events(path: str, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The events after byte `offset`, and the offset after them, without an unfinished line."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    events = []
    for line in whole.splitlines():
        with contextlib.suppress(ValueError):  # a line that a killed task did not finish
            event = json.loads(line)
            events += [event] if isinstance(event, dict) else []
    return events, offset + len(whole)


class Runner:
    """Works on the list of one Slurm task: its results, and the command that runs."""

    def __init__(self, folder: str, index: int, job: str, restarts: int) -> None:
        self.folder, self.index, self.job, self.restarts = folder, index, job, restarts
        self.results = f"{folder}/{index}.results"
        self.stopping = False
        self.child: subprocess.Popen[bytes] | None = None

    def record(self, **event: object) -> None:
        """Append an event; it is on disk when this returns."""
        data = json.dumps(event).encode() + b"\n"
        with open(self.results, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                data = data if file.read(1) == b"\n" else b"\n" + data
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def wanted(self) -> bool:
        """Whether this task was not abandoned, and no other copy of it works on the list."""
        if os.path.exists(f"{self.folder}/{self.index}.abandoned"):
            return False
        try:
            begun = [event for event in read_events(self.results)[0] if "begin" in event]
        except FileNotFoundError:  # all shards have been reported, and the batch was removed
            return False
        owner = begun[0]["job"] if begun else self.job
        return owner == self.job and all(event["begin"] <= self.restarts for event in begun if event["job"] == owner)

    def stop(self, *_: object) -> None:
        """End the running command, and start no others."""
        self.stopping = True
        self._signal(signal.SIGTERM)

    def watch(self, *_: object) -> None:
        """Stop if this task is no longer wanted."""
        if not self.stopping and not self.wanted():
            self.stop()

    def _signal(self, number: int) -> bool:
        """Signal the running command and its children; returns whether any is alive."""
        if self.child is None:
            return False
        try:
            os.killpg(self.child.pid, number)
        except ProcessLookupError:
            return False
        return True

    def execute(self, shard: dict[str, Any]) -> dict[str, object]:
        """Run a shard's command; returns its exit code, seconds and peak memory."""
        # a module or a container of `setup` may have put another Python first
        path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        environment = {**os.environ, "PATH": path, **dict.fromkeys(_THREADS, str(shard["threads"]))}
        command, script = [shard["shell"], "-c", shard["command"]], ""
        if len(shard["command"].encode()) > _LONGEST_ARGUMENT:
            descriptor, script = tempfile.mkstemp(suffix=".sh")
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(shard["command"])
            command = [shard["shell"], script]
        started = time.monotonic()
        # a process group of its own, so that signals reach what the command started
        self.child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
        if self.stopping:  # the signal came before there was a child
            self._signal(signal.SIGTERM)
        _, status, usage = os.wait4(self.child.pid, 0)
        self.child.returncode = code = os.waitstatus_to_exitcode(status)  # Popen must not wait again
        patience = GRACE if code in (-signal.SIGTERM, 128 + signal.SIGTERM) else 0.0
        deadline = time.monotonic() + patience
        while not self.stopping and time.monotonic() < deadline:
            time.sleep(0.05)
        while self.stopping and self._signal(0):  # the shell ends before the program that it started
            time.sleep(0.05)
        if script:
            os.remove(script)
        self.child = None
        seconds = round(time.monotonic() - started, 3)
        return {"exit": code, "seconds": seconds, "max_rss_mb": usage.ru_maxrss // 1024}

    def run(self) -> int:
        """Run every shard that has not ended; returns the exit code of the task."""
        with open(f"{self.folder}/{self.index}.json", encoding="utf-8") as file:
            shards = json.load(file)
        self.record(begin=self.restarts, job=self.job)
        if not self.wanted():
            print("another job works on these shards, or they were abandoned", flush=True)
            return 0
        events = read_events(self.results)[0]
        codes = {event["end"]: event["exit"] for event in events if "end" in event}
        if self.restarts and any(event.get("start", -1) not in (-1, *codes) for event in events):
            time.sleep(TAKEOVER)
        for number, shard in enumerate(shards):
            if self.stopping or not self.wanted():
                break
            if number in codes:
                continue
            self.record(start=number, time=os.stat(self.results).st_mtime)
            try:
                result = self.execute(shard)
            except OSError as error:
                self.record(unstarted=number)
                print(f"cannot start a command on this node: {error}", flush=True)
                return 1
            if self.stopping and result["exit"]:
                break
            self.record(end=number, **result)
            codes[number] = result["exit"]
            with contextlib.suppress(OSError):  # the disk of the log may be full, or away
                os.write(1, f"{shard['label']}: exit code {result['exit']} after {result['seconds']} s\n".encode())
        if self.stopping or len(codes) < len(shards):
            with contextlib.suppress(OSError):  # the batch was removed
                self.record(left=self.restarts)
            return 143
        return 1 if any(codes.values()) else 0


def main(folder: str) -> int:
    """Run the task that Slurm's environment variables name; returns its exit code."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    index = int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    job = f"{array}_{index}" if array else os.environ.get("SLURM_JOB_ID", "")
    runner = Runner(folder, index, job, int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGALRM})
    signal.signal(signal.SIGTERM, runner.stop)
    signal.signal(signal.SIGALRM, runner.watch)
    signal.setitimer(signal.ITIMER_REAL, WATCH, WATCH)
    return runner.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
