"""Our changes of Snakemake: records and lock of a run, existing results, failed jobs."""

import base64
import logging
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil
import pytest
import yaml
from snakemake.logging import DefaultFormatter
from snakemake_interface_logger_plugins.common import LogEvent

from tests.helpers import wait_for
from tests.workflow.pipeline import snakemake
from workflow import patches

COPIED = """
from workflow import snakefile
settings = snakefile.read_settings(workflow)
RUN = settings.run
onstart:
    snakefile.prepare_run(settings)
rule all:
    input: RUN / "b.txt", RUN / "changed.txt", RUN / "unknown.txt", RUN / "emptied.txt", RUN / "noise.txt"
rule b:
    input: RUN / "a.txt"
    output: RUN / "b.txt"
    shell: "cp {input:q} {output:q}"
rule a:
    output: RUN / "a.txt"
    params: f"{RUN}/other.txt"
    shell: "head -c 200000 /dev/zero > {output:q}"
rule changed:
    output: RUN / "changed.txt"
    params: settings.clean.min_characters
    shell: "touch {output:q}"
rule unknown:
    output: RUN / "unknown.txt"
    shell: "touch {output:q}"
rule emptied:
    output: RUN / "emptied.txt"
    shell: "touch {output:q}"
rule noise:
    output: RUN / "noise.txt"
    shell: "touch {output:q}"
"""

FAILING = """
from workflow import snakefile
settings = snakefile.read_settings(workflow)
rule all:
    input: "results/x/bad.txt", "results/x/again.txt"
rule bad:
    output: "results/x/bad.txt"
    retries: 3
    log: "results/x/bad.log"
    shell: "echo >> ran_bad; echo 'error: a.txt: no text' > {log}; exit 2"
rule again:
    output: "results/x/again.txt"
    log: "results/x/again.log"
    retries: 3
    shell: "echo >> ran_again; echo 'error: again' > {log}; [ $(wc -l < ran_again) = 2 ] && echo new > {output:q}"
"""
LOCKED = """
from workflow import snakefile
settings = snakefile.read_settings(workflow)
rule all:
    output: "results/x/x"
    log: "x.log"
    shell: "echo $$ >> runs; echo 'all: 3/10 documents, 0:00:07 left' > {log}; until [ -e go ]; do sleep 0.1; done"
"""
NOT_KNOWN = ("unknown.txt", "emptied.txt", "noise.txt")


def configure(folder: Path, snakefile: str, run: str = "results/x", characters: int = 5) -> None:
    """Write a Snakefile, a configuration and its list of URLs."""
    config = {"run": run, "urls": ["urls.txt"], "clean": {"min_characters": characters}}
    (folder / "Snakefile").write_text(snakefile)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "urls.txt").write_text("http://site.example/\n")


def rules(folder: Path, *arguments: str) -> set[str]:
    """The rules that Snakemake runs or plans."""
    done = snakemake(folder, "--cores", "1", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"^(?:local)?rule (\w+):", done.stdout + done.stderr, re.MULTILINE)) - {"all"}


def test_a_copied_run_is_planned_by_what_it_was_made_with(tmp_path: Path) -> None:
    configure(tmp_path, COPIED)
    assert rules(tmp_path) == {"a", "b", "changed", "unknown", "emptied", "noise"}
    shutil.rmtree(tmp_path / ".snakemake")
    copy = tmp_path / "results" / "y"
    shutil.copytree(tmp_path / "results/x", copy)
    os.utime(copy / "b.txt", (1, 1))  # as if it was copied before a.txt
    records = {name: copy / "records/metadata" / base64.urlsafe_b64encode(name.encode()).decode() for name in NOT_KNOWN}
    records["unknown.txt"].unlink()
    records["emptied.txt"].write_bytes(b"")
    records["noise.txt"].write_bytes(b"\xff\xfe\0")
    configure(tmp_path, COPIED, "results/y", characters=6)
    assert rules(tmp_path, "-n") == {"changed", "unknown", "emptied", "noise"}, "a damaged record is none"


def test_bad_input_ends_a_job_at_once_and_leaves_the_results_that_exist(tmp_path: Path) -> None:
    configure(tmp_path, FAILING)
    results = [tmp_path / "results/x" / name for name in ("bad.txt", "again.txt")]
    results[0].parent.mkdir(parents=True)
    for result in results:
        result.write_text("old\n")
    done = snakemake(tmp_path, "--cores", "1", "--keep-going", "--forceall", "--quiet")
    assert done.returncode == 1
    assert done.stderr.endswith("successfully.\nerror: a.txt: no text (results/x/bad.log)\n"), done.stderr
    assert (tmp_path / "ran_bad").read_text() == "\n" and results[0].read_text() == "old\n"
    assert (tmp_path / "ran_again").read_text() == "\n\n" and results[1].read_text() == "new\n", "tried again"


def test_a_working_folder_in_which_nothing_can_be_written_serves_a_run_elsewhere(tmp_path: Path) -> None:
    work, run = tmp_path / "work", tmp_path / "run"
    work.mkdir()
    configure(work, COPIED, str(run))
    (work / ".snakemake").touch()  # a folder cannot be made there, not even by root
    before = sorted(work.iterdir())
    planned = rules(work, "-n")
    assert not run.exists()
    assert rules(work) == planned == {"a", "b", "changed", *(Path(name).stem for name in NOT_KNOWN)}
    assert len(list(run.glob(".snakemake/log/*.log"))) == 1 and sorted(work.iterdir()) == before
    assert rules(work) == set(), "it has records"


def test_a_misspelt_target_names_the_closest_one(tmp_path: Path) -> None:
    configure(tmp_path, FAILING)
    for name, said in {"agian": "'agian' (did you mean 'again'?)", "results/x/bda.txt": "'results/x/bda.txt'"}.items():
        done = snakemake(tmp_path, name, "-n", "--quiet")
        assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(f"error: no target {said}; "), (
            done.stderr
        )


def start(folder: Path) -> "tuple[subprocess.Popen[bytes], list[str]]":
    """Snakemake on a terminal, and what it has written there, END last."""
    command, shown = [sys.executable, "-m", "snakemake", "--cores", "1", "--rerun-incomplete"], list[str]()
    try:
        ours, its = pty.openpty()
    except OSError as error:  # a chroot without /dev/pts
        pytest.skip(f"no pseudo-terminal here: {error}")
    process = subprocess.Popen(command, cwd=folder, stderr=its, process_group=0)
    os.close(its)

    def read() -> None:
        with suppress(OSError), open(ours, errors="replace") as terminal:  # EIO: all its processes have ended
            shown.extend(iter(lambda: terminal.read(1), ""))
        shown.append("END")

    Thread(target=read, daemon=True).start()
    return process, shown


def test_the_terminal_names_two_paths_of_a_list_and_the_log_file_all() -> None:
    paths = [f"results/x/dedup/work/{number}.pairs" for number in range(300)]
    event = {
        **{"event": LogEvent.JOB_INFO, "rule_name": "dedup_verify_0", "rule_msg": None, "jobid": 7, "local": False},
        **{"is_checkpoint": False, "input": paths, "output": paths[:3], "log": ["a.log"], "benchmark": None},
        **{"reason": f"Missing output files: {', '.join(paths[:4])}; Forced", "wildcards": {}, "priority": 0},
        **{"threads": 1, "resources": {"tmpdir": "/tmp"}},
    }
    record = logging.makeLogRecord(event)
    short, whole = (form(set(), False).format(record) for form in (patches.Abridged, DefaultFormatter))
    assert paths[299] in whole
    assert short.splitlines()[1:6] == [
        "rule dedup_verify_0:",
        f"    input: {paths[0]}, {paths[1]}, … (298 more)",
        f"    output: {', '.join(paths[:3])}",
        "    log: a.log",
        "    jobid: 7",
    ]
    assert f"    reason: Missing output files: {paths[0]}, {paths[1]}, … (2 more); Forced" in short


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill Snakemake alone, then the jobs that it left."""
    jobs = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for job in jobs:
        try:
            job.kill()
        except psutil.NoSuchProcess:
            continue


def test_a_live_run_keeps_its_lock_and_of_two_starts_after_it_was_killed_one_runs(tmp_path: Path) -> None:
    configure(tmp_path, LOCKED)
    runs = tmp_path / "runs"
    first, _ = start(tmp_path)
    try:
        wait_for(runs.exists)
    finally:
        kill(first)
    runs.unlink()
    both = [start(tmp_path), start(tmp_path)]
    wait_for(lambda: runs.exists() and any(process.poll() is not None for process, _ in both))
    both.sort(key=lambda one: one[0].poll() is not None)
    (live, shown), (refused, error) = both
    bar = re.compile("0:00:07 left 3/10 documents *\r?\n?")  # from the last line of the log
    wait_for(lambda: bar.search(re.sub(r"\x1b\[[\d;]*m", "", "".join(shown))) is not None)
    os.killpg(live.pid, signal.SIGINT)  # as a terminal's Ctrl-C
    assert live.wait() == 130 and refused.wait() == 2
    wait_for(lambda: shown[-1] == error[-1] == "END")
    last, whole = "".join(error).splitlines()[-2], "".join(shown)
    assert last.startswith(f"error: results/x is locked: process {live.pid} on "), "".join(error)
    assert "rerun the same command to continue" in whole and not re.search("Error|Traceback", whole), whole
    assert len(runs.read_text().split()) == 1
