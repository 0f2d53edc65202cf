"""Hashes of files: of all bytes, or quickly of what tells two contents apart."""

import hashlib
from pathlib import Path
from typing import Any

import xxhash

_PIECE, _PIECES = 1 << 16, 16  # bytes; files of up to a megabyte are read as a whole


def sha256(path: Path) -> str:
    """The hash of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path) -> dict[str, Any]:
    """`{"size": bytes, "xxh3": hex}`: what notices damage, at the speed of a disk."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "xxh3": hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}


def content_hash(path: Path) -> str:
    """The hash of a file's size and content; of one over a megabyte, evenly spaced pieces stand for the content.

    By it a later run notices that an input is another one now, whatever its time.
    """
    size = path.stat().st_size
    found = xxhash.xxh3_128(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, max(_PIECE, (size - _PIECE) // (_PIECES - 1))):
            file.seek(start)
            found.update(file.read(_PIECE))
    return found.hexdigest()
