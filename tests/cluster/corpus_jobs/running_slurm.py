"""sbatch, squeue, scancel and scontrol as one script that really runs the jobs, for tests without Slurm's daemons.

`install(folder)` puts the commands into folder/bin. Their state is in the same folder:

    calls          one line per call
    ID.json        an accepted batch: its options and script
    ID_INDEX       the state of a task, such as RUNNING
    refuse         if it exists, sbatch refuses with its lines
    most           if it exists, sbatch refuses an array of more tasks than its number
    partitions     if it exists, what `scontrol show partition` prints
    hold           if it exists, nothing starts; its text is the reason that squeue shows
    slow           if it exists, one sbatch renames it to `inside` and goes on when that is removed
    silent         if it exists, the controller does not answer
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)  # the last line of sbatch's errors, whatever the limit
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")


def install(folder: Path) -> dict[str, str]:
    """Make the commands; returns the environment variables with which a process finds them."""
    (folder / "bin").mkdir(parents=True)
    for name in COMMANDS:
        path = folder / "bin" / name
        path.write_text(f'#!/bin/bash\nexec {sys.executable} -IS {__file__} {folder} {name} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def calls(folder: Path, name: str) -> list[str]:
    """The calls of one command so far."""
    path = folder / "calls"
    return [line for line in path.read_text().splitlines() if line.startswith(f"{name} ")] if path.exists() else []


def options(folder: Path, job: str) -> dict[str, str]:
    """sbatch's options of a batch."""
    return dict(json.loads((folder / f"{job}.json").read_text())["options"])


def batches(folder: Path) -> list[str]:
    """The ids of all accepted batches, in order."""
    return sorted((path.stem for path in folder.glob("*.json")), key=int)


def end_task(folder: Path, task: str, state: str) -> None:
    """kill -9 all processes of a running task, as Slurm ends one; squeue shows `state` from then on."""
    import psutil

    (folder / f"{task}.final").write_text(state)
    process = psutil.Process(int((folder / f"{task}.pid").read_text()))
    for member in [process, *process.children(recursive=True)]:
        member.kill()
    while (folder / task).read_text() != state:
        time.sleep(0.02)


def _state(folder: Path, task: str, text: str) -> None:
    temporary = folder / f"{task}.new"
    temporary.write_text(text)
    temporary.replace(folder / task)


def _tasks(folder: Path, job: str) -> list[str]:
    count = json.loads((folder / f"{job}.json").read_text())["tasks"]
    return [f"{job}_{index}" for index in range(count)] if count else [job]


def _refuse(lines: str) -> int:
    for line in lines.splitlines():
        print(f"sbatch: error: {line}", file=sys.stderr)
    return 1


def sbatch(folder: Path, arguments: list[str]) -> int:
    if (folder / "refuse").exists():
        return _refuse((folder / "refuse").read_text())
    script = Path(arguments[-1]).read_text()
    if (folder / "slow").exists():
        (folder / "slow").rename(folder / "inside")
        while (folder / "inside").exists():
            time.sleep(0.05)
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    options = dict(shlex.split(line)[0].lstrip("-").partition("=")[::2] for line in lines)
    tasks = int(options.get("array", "0").rpartition("-")[2]) + 1
    if (folder / "most").exists() and tasks > int((folder / "most").read_text()):
        return _refuse(f"QOSMaxSubmitJobPerUserLimit\n{POLICY}")
    job = 1000
    while True:
        try:
            with open(folder / f"{job}.json", "x") as file:
                last = options.get("array", "").rpartition("-")[2]
                json.dump({"tasks": int(last) + 1 if last else 0, "options": options, "script": script}, file)
            break
        except FileExistsError:
            job += 1
    for task in _tasks(folder, str(job)):
        _state(folder, task, "PENDING")
    if not (folder / "hold").exists():
        start(folder, str(job))
    print(job)
    return 0


def start(folder: Path, job: str) -> None:
    """Run a batch in the background."""
    null = subprocess.DEVNULL
    command = [sys.executable, "-IS", __file__, str(folder), "daemon", job]
    subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)


def daemon(folder: Path, arguments: list[str]) -> int:
    """Run the tasks of a batch, four at a time."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # sbatch is called with signals blocked
    job = arguments[0]
    batch = json.loads((folder / f"{job}.json").read_text())
    (folder / f"{job}.script").write_text(batch["script"])

    def run(task: str) -> None:
        if (folder / task).read_text() != "PENDING":
            return
        index = task.rpartition("_")[2]
        restarts = folder / f"{task}.restarts"
        environment = {**os.environ, "SLURM_JOB_ID": task.replace("_", "00")}
        if restarts.exists():
            environment["SLURM_RESTART_COUNT"] = restarts.read_text()
        if batch["tasks"]:
            environment |= {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": index}
        log = batch["options"]["output"].replace("%a", index).replace("%%", "%")
        with open(log, "ab") as output:
            process = subprocess.Popen(
                ["bash", str(folder / f"{job}.script")],
                env=environment,
                stdout=output,
                stderr=output,
                cwd=batch["options"]["chdir"],
                start_new_session=True,
            )
            (folder / f"{task}.pid").write_text(str(process.pid))
            _state(folder, task, "RUNNING")
            code = process.wait()
        final = folder / f"{task}.final"
        _state(folder, task, final.read_text() if final.exists() else "FAILED" if code else "COMPLETED")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, _tasks(folder, job)))
    return 0


def squeue(folder: Path, arguments: list[str]) -> int:
    if (folder / "silent").exists():
        print("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", file=sys.stderr)
        return 1
    (which,) = [argument for argument in arguments if argument.startswith("--jobs=")]
    reason = (folder / "hold").read_text() if (folder / "hold").exists() else "None"
    for job in which.removeprefix("--jobs=").split(","):
        if (folder / f"{job}.json").exists():
            for task in _tasks(folder, job):
                state = (folder / task).read_text()
                print(f"{task}|name|{state}|{reason if state == 'PENDING' else 'None'}|node1")
    return 0


def scancel(folder: Path, arguments: list[str]) -> int:
    if (folder / "silent").exists():
        print("scancel: error: Unable to contact slurm controller (connect failure)", file=sys.stderr)
        return 1
    for job in arguments:
        for task in _tasks(folder, job) if (folder / f"{job}.json").exists() else [job]:
            state = (folder / task).read_text()
            if state == "PENDING":
                _state(folder, task, "CANCELLED")
            elif state == "RUNNING":
                (folder / f"{task}.final").write_text("CANCELLED")
                os.kill(int((folder / f"{task}.pid").read_text()), 15)
    return 0


def scontrol(folder: Path, arguments: list[str]) -> int:
    print("MaxArraySize            = 1001" if arguments == ["show", "config"] else "")
    if arguments[-1] == "partition" and (folder / "partitions").exists():
        print((folder / "partitions").read_text())
    return 0


if __name__ == "__main__":
    place, command, *rest = sys.argv[1:]
    if command != "daemon":
        with open(f"{place}/calls", "a") as calls_file:
            print(command, *rest, file=calls_file)
    sys.exit(globals()[command](Path(place), rest))
