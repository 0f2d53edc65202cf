"""Snakemake's records of what each result was made with, kept in RUN/records, beside the results.

Snakemake keeps them in .snakemake/metadata of the working folder, where a copy of the run does not find them, and
compares times, which a copy changes. Here

- a record is found under its result's path in RUN, and its paths in RUN are relative: a run may be copied or renamed;
- in a copied run, which RUN/run.json tells by the number of the folder's inode, a result has the time in its record;
- the inputs of `blacklist` and `ingest` are compared by content with what these steps have read (`inputs` in their
  stats.json), whatever their times;
- a result without a record is made again: nobody knows what it was made with.

Snakemake has no option for another place, so `install` replaces its class when the Snakefile is parsed.
"""

import base64
import json
import os
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from snakemake.io import Mtime
from snakemake.persistence.file import FilePersistence

from common import run_card
from common.console import note
from common.files import find_inputs, first_change, read_json
from common.settings import Settings

FOLDER = "records"
_STATS = {"blacklist": "urls/stats.json", "ingest": "ingest/stats.json"}  # where these rules say what they have read


def install(settings: Settings) -> None:
    """Make Snakemake keep its records in the run."""
    import snakemake.workflow

    snakemake.workflow.FilePersistence = partial(RunRecords, settings)


class RunRecords(FilePersistence):  # type: ignore[misc]
    """The records of one run."""

    def __init__(self, settings: Settings, **named: Any) -> None:
        super().__init__(**named)
        self._settings, self._inside = settings, f"{settings.run}/"
        self._metadata_path = str(settings.run / FOLDER / "metadata")
        self._incomplete_path = str(settings.run / FOLDER / "incomplete")
        self._max_len = 255  # instead of asking for that of a folder that does not exist yet
        self._change = cache(partial(changed_input, settings))
        if is_copy(settings.run):
            times = self.dag.workflow.iocache.mtime
            times.update((str(path), Mtime(local=time)) for path, time in recorded_times(settings.run))

    def _get_key(self, f: Any) -> str:
        return str(super()._get_key(f)).removeprefix(self._inside)

    def _input(self, job: Any) -> list[str]:
        return [str(path).removeprefix(self._inside) for path in super()._input(job)]

    def _params(self, job: Any) -> list[str]:
        return [text.replace(self._inside, "RUN/") for text in super()._params(job)]

    def has_metadata(self, job: Any) -> bool:
        """True: Snakemake ignores other changes of a job if this is False."""
        return True

    def _input_changed(self, job: Any, file: Any = None) -> bool:
        if self.metadata(file) is None:
            return os.path.exists(file) and _tell(self._settings.run)
        return super()._input_changed(job, file) or self._change(job.rule.name)


@cache
def _tell(run: Path) -> bool:
    note(
        f"{run}: has results without a record of what they were made with, which will be made again; "
        "to keep them as they are, run the same command with --touch first"
    )
    return True


def read_by(rule: str, settings: Settings) -> list[Path]:
    """The files from outside of the run that `blacklist` or `ingest` reads; none for other rules."""
    patterns = {"blacklist": settings.urls, "ingest": [source.path for source in settings.sources]}.get(rule, [])
    found = (path for pattern in patterns for path in find_inputs(pattern, "lists")[0])
    return [path for path in found if not path.is_relative_to(settings.run)]


def changed_input(settings: Settings, rule: str) -> bool:
    """Whether the files that a rule has read are others now; says which."""
    run = settings.run
    stats = run / _STATS.get(rule, "none")
    read = read_json(stats).get("inputs") if stats.is_file() else None
    if read is None:  # not a rule that reads files from outside, or statistics of an earlier version
        return False
    names = place(run)["names"]
    others = {path: found for path, found in read.items() if not any(map(Path(path).is_relative_to, names))}
    change = first_change(others, read_by(rule, settings))
    if change:
        note(change)
    return change is not None


def is_copy(run: Path) -> bool:
    """Whether a run was started last in another folder than this one."""
    inode = _card(run).get("inode")
    return inode is not None and inode != run.stat().st_ino


def place(run: Path) -> dict[str, Any]:
    """What run.json says of a run's folder: every name that it has had, and the number of its inode."""
    return {"names": sorted({*_card(run).get("names", []), str(run)}), "inode": run.stat().st_ino}


def _card(run: Path) -> dict[str, Any]:
    path = run / run_card.NAME
    return dict(read_json(path)) if path.is_file() else {}


def recorded_times(run: Path) -> Iterator[tuple[Path, float]]:
    """(path, time) of each result of a run that has a record."""
    folder = run / FOLDER / "metadata"
    for parent, _, names in os.walk(folder):
        for name in names:  # the path in base64; a long one is split into folders
            parts = (*Path(parent).relative_to(folder).parts, name)
            path = run / base64.urlsafe_b64decode("".join(part.removeprefix("@") for part in parts)).decode()
            record = json.loads(Path(parent, name).read_bytes())
            if path.exists() and record["endtime"]:
                yield path, record["endtime"]


def restore_times(run: Path) -> None:
    """Give the results of a copied run their times again, so that they are in order with those made from now on."""
    if is_copy(run):
        for path, time in recorded_times(run):
            os.utime(path, (time, time))
