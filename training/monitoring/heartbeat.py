"""Signs of life: where every process is, and the stacks of its threads when nothing happens any more.

RUN/heartbeat/JOB/rank_00003.json tells where rank 3 is. Each job has a folder of its own: of two that meet in one run
folder, neither removes the other's. After `watch.silence_seconds` without a beat each process writes the stacks of its
threads to rank_00003.stacks, from a thread that needs no Python (a process may hang inside a
library), and rank 0 says in the log which rank is not where the others are.
"""

import faulthandler
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.console import warn

_RENEWED = 10.0  # seconds after which the file is written anew: thousands of ranks share a file system
_SIZE = 256  # bytes of the file: one write replaces all of it


class Heartbeat:
    """This process' sign of life; `silence` seconds without a beat call for stacks, 0 never does.

    `job` differs between two jobs and is equal on all ranks of one.
    """

    def __init__(self, folder: Path, rank: int, silence: float, job: str) -> None:
        self.folder, self.rank, self.silence = folder / "heartbeat" / job, rank, silence
        self._about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._renewed = min(_RENEWED, silence / 4 or _RENEWED)
        self._over = threading.Event()

    def __enter__(self) -> "Heartbeat":
        if self.rank == 0:
            _forget_others(self.folder)
        for _ in range(100):  # another job that ends may remove the folder around ours
            with suppress(FileNotFoundError):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._stacks = (self.folder / f"rank_{self.rank:05d}.stacks").open("w")
                break
        self._path = Path(self._stacks.name).with_suffix(".json")
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self.beat(0, "start")
        self._thread = threading.Thread(target=self._renew, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()
        if self.silence:
            faulthandler.cancel_dump_traceback_later()
        os.close(self._file)
        self._stacks.close()
        # a run that never fell silent leaves nothing behind; what cannot be removed ends no run
        with suppress(OSError):
            stacks = self._path.with_suffix(".stacks")
            if not stacks.stat().st_size:
                stacks.unlink()
                self._path.unlink()
                for folder in (self.folder, self.folder.parent):  # until one in which others have yet to end
                    folder.rmdir()

    def beat(self, iteration: int, doing: str) -> None:
        """This process goes on: at `iteration`, it begins to do `doing`."""
        self._beat = (time.monotonic(), iteration, doing)
        if self.silence:
            faulthandler.dump_traceback_later(self.silence, repeat=True, file=self._stacks)

    def _renew(self) -> None:
        """The thread: renew the file; rank 0 says once a silence who is behind."""
        told, refused = 0.0, False
        while True:
            beaten, iteration, doing = self._beat
            life = json.dumps({**self._about, "iteration": iteration, "doing": doing, "time": time.time()})
            try:
                os.pwrite(self._file, life.encode().ljust(_SIZE - 1) + b"\n", 0)
            except OSError as error:
                if not refused:
                    warn(f"{self._path}: {error.strerror}; no sign of life of this process")
                refused = True
            if self._over.wait(self._renewed):
                return
            silent = self.silence and time.monotonic() - beaten >= self.silence and beaten == self._beat[0]
            if self.rank == 0 and silent and told != beaten:
                told = beaten
                where = f"{self.folder}/rank_*.stacks"
                said = describe(read_lives(self.folder), time.time() - 3 * _RENEWED)
                print(
                    f"warning: nothing has happened for {self.silence:g} s: {said}; stacks in {where}",
                    file=sys.stderr,
                    flush=True,
                )


def _forget_others(folder: Path) -> None:
    """Remove what killed jobs left, unless they have stacks to show."""
    for other in folder.parent.glob("*/"):
        if other != folder and not any(path.stat().st_size for path in other.glob("*.stacks")):
            shutil.rmtree(other, ignore_errors=True)


def read_lives(folder: Path) -> list[dict[str, Any]]:
    """The signs of life of all ranks of a job, in their order."""
    texts = [path.read_text() for path in sorted(folder.glob("rank_*.json"))]
    return [json.loads(text) for text in texts if text.endswith("\n")]  # the disk may have taken no more


def describe(lives: Sequence[Mapping[str, Any]], fresh: float) -> str:
    """Where most ranks are, and which are elsewhere, or gave no sign of life since `fresh` (seconds of the epoch)."""
    places = Counter((life["iteration"], life["doing"]) for life in lives if life["time"] >= fresh)
    most = max(places, key=lambda place: (places[place], place)) if places else None
    said = [f"{places[most]} of {len(lives)} ranks at iteration {most[0]} ({most[1]})"] if most else []
    for life in lives:
        who = f"rank {life['rank']} (process {life['pid']} on {life['host']})"
        if life["time"] < fresh:
            said.append(f"{who} gives no sign of life since iteration {life['iteration']} ({life['doing']})")
        elif (life["iteration"], life["doing"]) != most:
            said.append(f"{who} at iteration {life['iteration']} ({life['doing']})")
    return ", ".join(said[:9] + ["…"] * (len(said) > 9))
