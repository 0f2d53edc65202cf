"""Expands the paths, folders and globs of an option to files, and finds inputs that have changed.

A step's folder also holds rejects, statistics, journals and temporary files. Folders and globs
leave them out, with a note on stderr. Named directly, they are refused.
"""

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import xxhash

from common.console import note
from common.errors import InputError
from common.files.documents import holds_rejects
from common.files.reading import COMPRESSED, is_readable, read_json, read_lines
from common.files.writing import file_identity

Kind = Literal["shards", "lists", "sources", "files"]
"""What an option reads: shards of documents; URL lists; existing text; other files."""

_SHARD = re.compile(rf".*\.jsonl({'|'.join(map(re.escape, COMPRESSED))})?")
_UNFINISHED = (".tmp", ".journal", ".records")
_FIGURES = re.compile(r"(.*\.)?(stats|counts)\.json|clusters\.json")
_REJECTS_FOLDERS = ("rejects", "removed")
_NOUNS: dict[Kind, str] = {
    "shards": "shards of documents",
    "lists": "lists or texts",
    "sources": "texts",
    "files": "files",
}
_NAMED = 3  # files that a note names


def _walk(folder: Path) -> Iterator[Path]:
    """Every file below a folder except hidden ones. Follows links, and visits each folder once."""
    seen, folders = {file_identity(folder)}, [folder]
    for each in folders:
        for path in sorted(each.iterdir()):
            if path.name.startswith("."):
                continue
            if not path.is_dir():
                yield path
            elif (identity := file_identity(path)) not in seen:  # a link may lead to a parent folder
                seen.add(identity)
                folders.append(path)


def _is_other(path: Path, kind: Kind) -> bool:
    """Whether a regular file is a step's temporary file, statistics or rejects."""
    if path.suffix in _UNFINISHED or kind == "files" or not path.is_file():  # a pipe can be read only once
        return path.suffix in _UNFINISHED
    if _FIGURES.fullmatch(path.name):
        return True
    status = path.stat()
    is_rejects = _holds_rejects(path, status.st_size, status.st_mtime_ns)
    return path.parent.name in _REJECTS_FOLDERS if is_rejects is None else is_rejects


@cache
def _holds_rejects(path: Path, _size: int, _mtime_ns: int) -> bool | None:
    """`holds_rejects`, once for each content: planning lists sources several times."""
    return holds_rejects(path)


def _matches(pattern: str) -> dict[Path, bool]:
    """The files that a glob matches, each with whether it is inside a matching folder."""
    matches: dict[Path, bool] = {}
    for name in glob.glob(pattern, recursive=True):
        if not os.path.isdir(name):
            matches[Path(name)] = False
        elif "**" not in pattern:
            matches |= dict.fromkeys(_walk(Path(name)), True)
    return matches


_PATHS = re.compile(r".*\.paths(\.gz)?")
_TRAIN = re.compile(r"(.*[-_./])?train([-_./].*)?")


def _split(folder: Path, files: Iterable[Path]) -> set[Path]:
    """The Parquet and Arrow files of a dataset folder: of its train split, or all."""
    tables = {path for path in files if path.suffix in (".parquet", ".arrow") and not path.name.startswith("cache-")}
    for state in {path for path in files if path.name == "state.json" and path.with_name("dataset_info.json").exists()}:
        with suppress(KeyError, TypeError):  # of Dataset.save_to_disk, or another program's
            tables |= {state.with_name(each["filename"]) for each in read_json(state)["_data_files"]}
    return {folder / table for table in train_split(path.relative_to(folder) for path in tables)}


def train_split(tables: Iterable[Path]) -> set[Path]:
    """The tables of the train split, or all: paths below the folder of a dataset."""
    every = set(tables)
    return {table for table in every if _TRAIN.fullmatch(table.as_posix())} or every


def is_left_out(name: str) -> bool:
    """Whether folders and globs leave out a file by its path below them: hidden or unfinished."""
    return any(re.match(r"\.(?!\.?$)", part) for part in name.split("/")) or name.endswith(_UNFINISHED)


def _listed(path: Path) -> list[Path]:
    """The files in a Common Crawl list such as warc.paths.gz, next to it or below its folder.

    Raises InputError if some are missing.
    """
    names = [name for line in read_lines(path) if (name := line.decode("utf-8", "replace").strip())]
    files = [path.parent / name if (path.parent / name).exists() else path.with_name(Path(name).name) for name in names]
    missing = [name for name, file in zip(names, files, strict=True) if not file.is_file()]
    if missing:
        raise InputError(
            f"{path}: {len(missing):,} of its {len(names):,} files are missing below {path.parent}, such as "
            f"{missing[0]}; nothing is downloaded: put them there, or shorten the list"
        )
    return files


def find_inputs(pattern: str, kind: Kind) -> tuple[list[Path], list[Path]]:
    """The files that a pattern matches, and those that are left out; see `expand_inputs`."""
    path = Path(pattern)
    if is_readable(path):
        if _is_other(path, kind):
            raise InputError(f"{path}: rejects, statistics or a temporary file, not an input; name the step's shards")
        return _listed(path) if kind == "sources" and _PATHS.fullmatch(path.name) else [path], []
    matches = dict.fromkeys(_walk(path), True) if path.is_dir() else _matches(pattern)
    if kind == "sources" and path.is_dir() and (split := _split(path, matches)):
        return sorted(split), sorted(matches.keys() - split)
    left_out = set()
    for file, in_folder in matches.items():
        is_shard = kind != "shards" or not in_folder or _SHARD.fullmatch(file.name)
        if not file.is_file() or not is_shard or _is_other(file, kind):  # reading a pipe would block
            left_out.add(file)
    return sorted(matches.keys() - left_out), sorted(left_out)


def expand_inputs(patterns: Iterable[str], kind: Kind = "files") -> list[Path]:
    """The files of all patterns: paths, folders and globs (sorted); `-` is stdin.

    Raises InputError for a pattern that matches nothing.
    """
    paths: list[Path] = []
    for pattern in patterns:
        files, left_out = find_inputs(pattern, kind)
        names = ", ".join(map(str, left_out[:_NAMED])) + (", …" if len(left_out) > _NAMED else "")
        skipped = f"{len(left_out)} left out: {names}" if left_out else ""
        if not files:
            problem = f"holds no {_NOUNS[kind]}" if Path(pattern).is_dir() else "no such file or folder"
            raise InputError(f"{pattern}: {problem}" + (f" ({skipped})" if skipped else ""))
        if skipped:
            note(f"{pattern}: {len(files)} {_NOUNS[kind]}, {skipped}")
        paths.extend(files)
    return paths


def require_regular(paths: Iterable[Path], reader: str) -> None:
    """Raise InputError for a pipe or a device, because `reader` reads its inputs twice."""
    for path in paths:
        if str(path) == "-" or (path.exists() and not path.is_file()):
            raise InputError(f"{path}: is not a regular file, but {reader} reads it twice; write it to a file first")


Fingerprint = dict[str, Any]
"""`{"size": 812, "mtime_ns": 1763850000000000000, "sha256": "…"}`"""


def fingerprint(path: Path) -> Fingerprint:
    """Size, time and hash of a file. Take it before reading, so that a later change is seen."""
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """The hash of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path) -> dict[str, Any]:
    """`{"size": bytes, "xxh3": hex}`, to detect damage."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "xxh3": hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}


def first_change(read: Mapping[str, Fingerprint], now: Iterable[Path]) -> str | None:
    """The first change of content since the files were read, or None."""
    files = {str(path): path for path in now}
    for name in sorted(read.keys() ^ files.keys()):
        return f"{name}: {'new' if name in files else 'missing'} since the inputs were read"
    for name, path in files.items():
        then, status = read[name], path.stat()
        same_size = status.st_size == then["size"]
        if not same_size or (status.st_mtime_ns != then["mtime_ns"] and sha256(path) != then["sha256"]):
            return f"{name}: changed since it was read"
    return None
