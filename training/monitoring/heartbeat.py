"""Shows where each process of a job is; dumps stacks and collective calls if the job hangs.

MODEL_FOLDER/heartbeat/JOB/rank_00003.json says where rank 3 is; each job has its own folder. After
`watch.silence_seconds` without a beat each process writes the stacks of its threads to
rank_00003.stacks, without needing Python (a process may hang inside a library), and torch's flight
recorder, its last 2,000 collective calls, to rank_00003.collectives.json. Rank 0 logs which ranks
are not where the others are, and the calls that have not completed.
"""

import faulthandler
import json
import os
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

from common.console import warn

_REFRESH = 10.0  # seconds between two writes of the file: thousands of ranks share a file system
_SIZE = 512  # bytes of the file: a single write replaces all of it


class Heartbeat:
    """This process's heartbeat file; after `silence` seconds without a beat it dumps the stacks.

    With 0 it never does. `job` differs between two jobs and is equal on all ranks of one.
    """

    def __init__(self, folder: Path, rank: int, silence: float, job: str) -> None:
        self.folder, self.rank, self.silence = folder / "heartbeat" / job, rank, silence
        self._about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._interval = min(_REFRESH, silence / 4 or _REFRESH)
        self._ended = threading.Event()
        self._failed = False
        self._hung = (0.0, "")  # time of the beat after which this process hung, and in which collective calls
        self._progress: Mapping[str, Any] = {}  # what else the file says, see `progress_of`

    def __enter__(self) -> "Heartbeat":
        if self.rank == 0:
            for other in self.folder.parent.glob("*/"):  # of killed jobs; kept if they hold stacks
                if other != self.folder and not any(path.stat().st_size for path in other.glob("*.stacks")):
                    shutil.rmtree(other, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stacks = (self.folder / f"rank_{self.rank:05d}.stacks").open("w")
        self._path = Path(self._stacks.name).with_suffix(".json")
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self.beat(0, "start")
        self._write()
        self._thread = threading.Thread(target=self._refresh, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()
        if self.silence:
            faulthandler.cancel_dump_traceback_later()
        os.close(self._file)
        self._stacks.close()
        # a job that never hung leaves no files; one that cannot be removed is no error
        with suppress(OSError):
            stacks = self._path.with_suffix(".stacks")
            if not stacks.stat().st_size:
                stacks.unlink()
                self._path.unlink()
                for folder in (self.folder, self.folder.parent):  # fails while other ranks still have files there
                    folder.rmdir()

    def beat(self, iteration: int, doing: str) -> None:
        """Record progress: at `iteration` this process begins `doing`."""
        self._beat = (time.monotonic(), iteration, doing)
        if self.silence:
            faulthandler.dump_traceback_later(self.silence, repeat=True, file=self._stacks)

    def report(self, figures: Mapping[str, Any]) -> None:
        """Add figures for `progress_of`; the first ones are written at once: people wait."""
        first = not self._progress
        self._progress = {**self._progress, **figures}
        if first:
            self._write()

    def _write(self) -> float:
        """Write the newest beat to the file; returns its time. Warns once if that fails."""
        beaten, iteration, doing = self._beat
        where = {"iteration": iteration, "doing": doing}
        if self.silence and time.monotonic() - beaten >= self.silence and self._hung[0] != beaten:
            calls = dump_collectives(self._path.with_suffix(".collectives.json"))
            self._hung = (beaten, shorten(calls, _SIZE // 3, placeholder=" …"))
        if self._hung[0] == beaten and self._hung[1]:
            where["hangs_in"] = self._hung[1]
        life = json.dumps({**self._about, **where, "time": time.time(), **self._progress})
        try:
            os.pwrite(self._file, life.encode().ljust(_SIZE - 1) + b"\n", 0)
        except OSError as error:
            if not self._failed:
                warn(f"{self._path}: {error.strerror}; this process writes no heartbeats")
            self._failed = True
        return beaten

    def _refresh(self) -> None:
        """The thread: rewrite the file; rank 0 warns once per silence, and names the ranks."""
        warned = 0.0
        while not self._ended.wait(self._interval):
            beaten = self._write()
            longest = self.silence + self._interval  # all ranks have written where they hang
            silent = self.silence and time.monotonic() - beaten >= longest and beaten == self._beat[0]
            if self.rank == 0 and silent and warned != beaten:
                warned = beaten
                where = describe(read_heartbeats(self.folder), time.time() - 3 * _REFRESH)
                stacks = f"{self.folder}/rank_*.stacks"
                warn(f"nothing has happened for {self.silence:g} s: {where}; stacks in {stacks}")


def dump_collectives(path: Path) -> str:
    """Write torch's records of this process's collective calls; returns the unfinished ones."""
    from torch._C import _distributed_c10d as c10d

    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # NCCL's, where torch has it, and gloo's
    traces = [json.loads(getattr(c10d, name)()) for name in names if hasattr(c10d, name)]
    with suppress(OSError):
        path.write_text(json.dumps(traces))
    return " and ".join(call for trace in traces for call in unfinished(trace))


def unfinished(trace: Mapping[str, Any]) -> list[str]:
    """Each process group's first unfinished collective call; between two ranks, the last one."""
    done = {group: int(status["last_completed_collective"]) for group, status in trace.get("pg_status", {}).items()}
    calls: dict[tuple[int, bool], str] = {}
    for call in trace.get("entries", []):  # oldest first; a part of a coalesced call is never marked as completed
        group, pair = call["pg_id"], call["is_p2p"]
        number = call["p2p_seq_id" if pair else "collective_seq_id"]
        if call["retired"] or call["state"] == "completed" or (number <= done.get(str(group), -1) and not pair):
            continue
        if pair or (group, pair) not in calls:
            calls[group, pair] = f"{call['profiling_name']} {number} of {call['process_group'][1] or group}"
    return list(calls.values())


def read_heartbeats(folder: Path) -> list[dict[str, Any]]:
    """The heartbeats of all ranks of a job, in rank order."""
    return _read(sorted(folder.glob("rank_?????.json")))  # not the collective calls


def _read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The heartbeats in files, leaving out files without one: a full disk, or a job that ends."""
    beats: list[dict[str, Any]] = []
    for path in paths:
        with suppress(OSError, ValueError):
            beats.append(json.loads(path.read_text()))
    return beats


def progress_of(model_folder: Path) -> Mapping[str, Any]:
    """The newest progress in a model folder: steps `done`, `loss`, `seconds_left`; empty at first.

    train.csv has the same figures, but only every log_interval iterations.
    """
    beats = [beat for beat in _read(model_folder.glob("heartbeat/*/rank_00000.json")) if "done" in beat]
    return max(beats, key=lambda beat: beat["time"], default={})


def describe(heartbeats: Sequence[Mapping[str, Any]], fresh: float) -> str:
    """Where most ranks are, and which are elsewhere or silent since `fresh` (Unix seconds)."""
    places = [
        (beat["iteration"], ", in ".join(filter(None, (beat["doing"], beat.get("hangs_in"))))) for beat in heartbeats
    ]
    counts = Counter(place for place, beat in zip(places, heartbeats, strict=True) if beat["time"] >= fresh)
    most = max(counts, key=lambda place: (counts[place], place)) if counts else None
    parts = [f"{counts[most]} of {len(heartbeats)} ranks at iteration {most[0]} ({most[1]})"] if most else []
    for (iteration, doing), beat in zip(places, heartbeats, strict=True):
        who = f"rank {beat['rank']} (process {beat['pid']} on {beat['host']})"
        if beat["time"] < fresh:
            parts.append(f"{who} has been silent since iteration {iteration} ({doing})")
        elif (iteration, doing) != most:
            parts.append(f"{who} at iteration {iteration} ({doing})")
    return ", ".join(parts[:9] + ["…"] * (len(parts) > 9))
