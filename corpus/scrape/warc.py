"""Read the records of WARC files, with the position of each.

    for start, end, kind in read_records(file, path, lambda record: record.rec_type): ...

warcio parses the records; members, offsets and recovery from damage are ours. fastwarc 2.0.1 saves 40 us per
record (extraction takes 2,000 us), but ends at the first damaged record, and accepts half of a truncated one.
"""

import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import zstandard
from warcio.bufferedreaders import BufferedReader
from warcio.exceptions import ArchiveLoadFailed
from warcio.recordloader import ArcWarcRecordLoader

from common.errors import InputError, TruncatedError
from common.files import kind_of, read_head
from corpus.scrape.response import ZSTD_MAGIC

GZIP_MAGIC = b"\x1f\x8b\x08"  # the first bytes of a gzip member
_MAGIC = re.compile(rb"\x1f\x8b\x08|\x28\xb5\x2f\xfd")
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18(.{4})", re.DOTALL)  # a zstd frame without text: magic, size
_DICTIONARY = b"\x5d\x2a\x4d\x18"  # of the skippable frame with the zstd dictionary of a file, by IIPC's draft
_WARC = b"WARC/"
_NEXT = re.compile(rb"\n(?=WARC/\d\.\d\r?\n[\w-]+:)")
DAMAGED = object()
"""Takes the place of a record that cannot be read."""
_BLOCK = 1 << 16  # bytes read at a time
_ZSTD_BLOCK = 1 << 10  # zstandard has no output limit: at most some 30 MB of a record that is all alike
_GZIP = type(zlib.decompressobj())


class _Members:
    """Gzip members or zstd frames of an open file, as a file that ends before the next member that begins a record.

    Most writers begin one per record; bgzip and others begin them anywhere, and some add empty ones. Unless `joined`,
    the file ends with the member.
    """

    def __init__(self, file: IO[bytes], path: Path, joined: bool = True) -> None:
        self.file, self.path, self.joined, self.spans = file, path, joined, False
        begin = file.tell()
        file.seek(0)
        head = file.read(8)
        words = file.read(int.from_bytes(head[4:], "little")) if head.startswith(_DICTIONARY) else b""
        file.seek(begin)
        with suppress(zstandard.ZstdError):  # without it, frames are damaged
            if words.startswith(ZSTD_MAGIC):
                words = zstandard.ZstdDecompressor().decompressobj().decompress(words)
        self._dictionary = zstandard.ZstdCompressionDict(words) if words else None
        self._padded = False

    def begin(self) -> bool:
        """Begin with the member at the file's position, after skippable frames and zeros that pad a gzip member.

        False if there is none.
        """
        if self._padded:
            block = b""
            while not block and (block := self.file.read(_BLOCK)):
                block = block.lstrip(b"\0")
            self.file.seek(-len(block), os.SEEK_CUR)
        while found := _SKIPPABLE.match(head := self.file.read(8)):
            self.file.seek(int.from_bytes(found[1], "little"), os.SEEK_CUR)
        self.start = self.file.seek(-len(head), os.SEEK_CUR)
        self._stream, self._rest = self._opened(head), b""
        self._padded = self._padded or self.is_gzip
        return self._stream is not None

    def _opened(self, head: bytes) -> Any:
        """A decompressor for the gzip member or zstd frame that begins with `head`; None for anything else."""
        if head and GZIP_MAGIC.startswith(head[:3]):
            return zlib.decompressobj(wbits=31)
        frames = zstandard.ZstdDecompressor(self._dictionary, max_window_size=2**31)
        return frames.decompressobj() if head and ZSTD_MAGIC.startswith(head[:4]) else None

    def read(self, size: int) -> bytes:
        """Some bytes. After all are read, the file is at the next record. Raises as `_read` does."""
        data = self._read(size)
        while not data and self._stream and self.joined:
            end = self.file.tell()
            try:
                data = self._read(len(_WARC)) if self.begin() else _WARC
                while 0 < len(data) < len(_WARC) and (more := self._read(len(_WARC) - len(data))):
                    data += more
            except (zlib.error, TruncatedError):
                data = _WARC
            if data.startswith(_WARC):  # a record, other bytes, or damage, with which `begin` begins
                self._stream = None
                self.file.seek(end)
                return b""
            self.spans = self.spans or bool(data)
        return data

    @property
    def is_gzip(self) -> bool:
        """Whether the member is gzip's."""
        return isinstance(self._stream, _GZIP)

    def _read(self, size: int) -> bytes:
        """Some bytes of a member. Raises zlib.error if it is damaged, TruncatedError if the file ends inside it."""
        while self._stream and not self._stream.eof:
            packed = self._rest or self.file.read(_BLOCK if self.is_gzip else _ZSTD_BLOCK)
            try:
                data: bytes = self._stream.decompress(packed, *[size] * self.is_gzip)
            except zstandard.ZstdError as error:
                raise zlib.error(str(error)) from None
            self._rest = self._stream.unconsumed_tail
            if self._stream.eof:
                self.file.seek(-len(self._stream.unused_data), os.SEEK_CUR)
            elif not packed and not data:
                raise _truncated(self.path, self.start)
            if data:
                return data
        return b""

    def seek(self, start: int) -> bool:
        """Move to the next member that begins with a record, at `start` or later; False if there is none."""
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for found in _MAGIC.finditer(view, start):
                block = view[found.start() : found.start() + _BLOCK]
                with suppress(zlib.error, zstandard.ZstdError):  # compressed data may contain the magic bytes
                    if self._opened(block).decompress(block).startswith(_WARC):
                        self.file.seek(found.start())
                        return True
        self.file.seek(0, os.SEEK_END)
        return False


def _truncated(path: Path, start: int) -> TruncatedError:
    return TruncatedError(f"{path}: ends inside the record at byte {start}; fetch it again, or truncate it there")


def _records(stream: Any) -> Iterator[tuple[int, Any]]:
    """Yield (offset, record) of a stream; (offset, None) for lines of no record, up to the next line that begins one.

    Without a blank line after a record its Content-Length is wrong: as in warcio, one line more may be ignored, so it
    is (offset, False); if more follow, they have the offset of the record.
    """
    reader, loader, lost = BufferedReader(stream), ArcWarcRecordLoader(), False
    at, behind = 0, 2  # lines behind the record, 2 after a blank one
    while line := reader.readline(_BLOCK):
        begins, record = line.startswith(_WARC), None
        if not line.strip() or (not begins and behind == 0):
            if line.strip():
                yield reader.tell() - reader.rem_length() - len(line), False
            behind = 1 if line.strip() else 2
            continue
        if begins or behind == 2:
            at = reader.tell() - reader.rem_length() - len(line)
        if begins:
            with suppress(ArchiveLoadFailed):
                record = loader.parse_record_stream(reader, line, "warc", no_record_parse=True)
            if record and not str(record.rec_headers.get_header("Content-Length")).isdecimal():
                record = None
        if record or begins or not lost:
            yield at, record
        lost, behind = record is None, 0 if record else 2


def complete_records(file: IO[bytes], path: Path, parse: Callable[[Any], Any]) -> Iterator[tuple[int, int, Any]]:
    """Yield (start, end, `parse(record)`) of each gzip member that is one complete record, whatever lies between them.

    Archives of ours consist of such members. What follows the last one is torn, and raises nothing.
    """
    members, at = _Members(file, path, joined=False), 0
    while file.seek(at) == at and (members.begin() or (members.seek(at) and members.begin())):
        start, at, found = members.start, members.start + 1, []
        with suppress(zlib.error, TruncatedError):
            for _, record in _records(members):
                if record is not False:
                    found.append(DAMAGED if record is None else parse(record))
                while record and record.raw_stream.read(_BLOCK):
                    pass
                found += [DAMAGED] * bool(record and record.raw_stream.limit)  # fewer bytes than Content-Length
            if len(found) == 1 and found[0] is not DAMAGED and members.is_gzip:
                at = file.tell()
                yield start, at, found[0]


def _next_record(file: IO[bytes], start: int) -> int:
    """Where the next record of a plain file begins after `start`, or the end of the file."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        found = _NEXT.search(view, start)
        return found.end() if found else len(view)


def read_records(file: IO[bytes], path: Path, parse: Callable[[Any], Any]) -> Iterator[tuple[int, int, Any]]:
    """Yield (start, end, `parse(record)`) of each record from the file's position on; DAMAGED for damaged ones.

    Where each record begins a gzip member or zstd frame, damage costs one record. Records that begin elsewhere, and
    those of a plain file, have no end (0). In a plain file a record whose Content-Length is wrong is damaged, and the
    next one is searched for inside it. Raises InputError as `read_pages` does.
    """
    members, total, compressed, first, size = (
        _Members(file, path),
        0,
        False,
        file.tell(),
        os.fstat(file.fileno()).st_size,
    )
    while (packed := members.begin()) or os.pread(file.fileno(), 1, members.start):
        start, count, held, whole, cause, resume = members.start, 0, None, False, "", size
        compressed, members.spans = compressed or packed, False
        try:
            if compressed and not packed:
                raise zlib.error("neither gzip nor zstd")
            for at, record in _records(members if packed else file):
                if not record and not packed and held:  # lines of no record, or of one inside the record before them
                    is_inside = _next_record(file, start + held[0]) < start + at
                    at, record = (held[0], None) if is_inside else (at, record)
                if record is False:
                    continue
                if held and held[0] != at:
                    count, total = count + 1, total + (held[1] is not DAMAGED)
                    yield start if packed else start + held[0], 0, held[1]
                held = at, DAMAGED if record is None else parse(record)
                while record and record.raw_stream.read(_BLOCK):
                    pass
                if record and record.raw_stream.limit:  # fewer bytes than Content-Length
                    if not packed and _next_record(file, start + at) == size:
                        raise _truncated(path, start + at)
                    held, record = (at, DAMAGED), None
                if record is None and not packed:
                    resume = _next_record(file, start + at)
                    break
                whole = not members.spans
        except zlib.error as error:
            if count or (members.spans and not whole):
                raise InputError(f"{path}: damaged after {total} records ({error}); fetch it again") from None
            if held and members.spans:  # the next member is damaged, so that no record seems to begin there
                total += 1
                yield start, members.start, held[1]
                start, members.spans = members.start, False
            held, cause = (0, DAMAGED), str(error)
            members.seek(start + 1)
        if held and held[1] is DAMAGED and not compressed:
            tail = os.pread(file.fileno(), _BLOCK, start + held[0])
            if start == first and not count and members.seek(start + 1):
                held = 0, DAMAGED
            elif resume == size and _WARC.startswith(tail[: len(_WARC)]) and b"\n\r\n" not in tail:
                raise _truncated(path, start + held[0])
            else:
                file.seek(resume)
        if held:  # only now is the checksum of a single record verified
            total += held[1] is not DAMAGED
            if not total and not os.pread(file.fileno(), 1, file.tell()):
                packing, head = read_head(path)
                cause = cause or f"{kind_of(head)[0] or 'another format'}{packing and f', {packing}-compressed'}"
                raise InputError(f"{path}: no WARC record inside ({cause}); name only WARC files, or fetch it again")
            end = file.tell() if compressed and not count and not members.spans else 0
            yield start if packed else start + held[0], end, held[1]
