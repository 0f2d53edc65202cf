"""Random access to lines of a compressed file."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import IO

from common.errors import InputError
from common.files.reading import COMPRESSED, Frames, decompressed
from common.files.writing import naming

_BLOCK = 1 << 18  # bytes read at a time


def lines_at(path: Path, frames: Frames, lines: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """The lines with some (position, length), ordered by position; `located_documents` gives both and `frames`.

    Reads the frames that hold them, so a file of one frame up to the last of them; any file that is not compressed is
    read only there. Raises InputError for a file that is damaged, or shorter than that.
    """
    text: Iterator[bytes] = iter(())
    start, held = 0, b""  # text from `start` on, the last that has been read
    with path.open("rb") as file, naming(path):
        for position, length in lines:
            if path.suffix not in COMPRESSED:
                file.seek(position)
                start, held = position, file.read(length)
            elif (index := bisect_right(frames, position, key=itemgetter(1)) - 1) >= 0 and (
                not held or frames[index][1] > start + len(held)
            ):
                text = decompressed(_blocks(file, frames, index), path)
                start, held = frames[index][1], b""
            while start + len(held) < position + length:
                skipped = min(max(position - start, 0), len(held))
                if (more := next(text, None)) is None:
                    raise InputError(f"{path}: shorter than when it was read first; run the steps after it again")
                start, held = start + skipped, held[skipped:] + more
            yield held[position - start : position - start + length]


def _blocks(file: IO[bytes], frames: Frames, index: int) -> Iterator[bytes]:
    """The bytes of the frames from one on, in blocks that end with a frame."""
    file.seek(frames[index][0])
    for following in range(index + 1, len(frames) + 1):
        left = frames[following][0] - frames[following - 1][0] if following < len(frames) else None
        while data := file.read(_BLOCK if left is None else min(_BLOCK, left)):
            left = left and left - len(data)
            yield data
