"""Fingerprints of a step's inputs: size, time and hash, which show a later run that an input has changed.

A file with another time but the same content has not changed.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

Fingerprint = dict[str, Any]
"""`{"size": 812, "mtime_ns": 1763850000000000000, "sha256": "…"}`"""


def fingerprint(path: Path) -> Fingerprint:
    """The fingerprint of a file. Take it before reading: a file that changes after that has a later time."""
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """The hash of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path) -> dict[str, Any]:
    """`{"size": bytes, "xxh3": hex}`, which detect damage."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "xxh3": hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}


def first_change(read: Mapping[str, Fingerprint], now: Iterable[Path]) -> str | None:
    """The first change of the files since they were read, or None; only files with another time are hashed."""
    files = {str(path): path for path in now}
    for name in sorted(read.keys() ^ files.keys()):
        return f"{name}: {'new' if name in files else 'missing'} since the inputs were read"
    for name, path in files.items():
        then, found = read[name], path.stat()
        same_size = found.st_size == then["size"]
        if not same_size or (found.st_mtime_ns != then["mtime_ns"] and sha256(path) != then["sha256"]):
            return f"{name}: changed since it was read"
    return None
