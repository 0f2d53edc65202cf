"""Read the records of WARC files, with the position of each.

    for start, end, kind in read_records(file, path, lambda record: record.rec_type): ...

warcio parses the records; members, offsets and recovery from damage are ours. fastwarc 2.0.1 saves
40 us per record (extraction takes 2,000 us), but ends at the first damaged record, and accepts half
of a truncated one.
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
_DICTIONARY = b"\x5d\x2a\x4d\x18"  # of the skippable frame with a file's zstd dictionary, by IIPC's draft
_WARC = b"WARC/"
_NEXT = re.compile(rb"\n(?=WARC/\d\.\d\r?\n[\w-]+:)")
DAMAGED = object()
"""Takes the place of a record that cannot be read."""
_BLOCK = 1 << 16  # bytes read at a time
_ZSTD_BLOCK = 1 << 10  # zstandard has no output limit: these may decompress to 30 MB
_GZIP = type(zlib.decompressobj())
_Parse = Callable[[Any], Any]
_Located = Iterator[tuple[int, int, Any]]


class _Members:
    """Gzip members or zstd frames, read like a file that ends where a new member begins a record.

    Most writers begin one per record; bgzip and others begin them anywhere, and some add empty
    ones. Unless `joined`, the file ends with the member. `spans`: several members were read.
    """

    def __init__(self, file: IO[bytes], path: Path, joined: bool = True) -> None:
        self.file, self.path, self.joined, self.spans = file, path, joined, False
        head = os.pread(file.fileno(), 8, 0)
        size = int.from_bytes(head[4:], "little") if head.startswith(_DICTIONARY) else 0
        words = os.pread(file.fileno(), size, len(head))
        with suppress(zstandard.ZstdError):  # without a dictionary, frames are damaged
            if words.startswith(ZSTD_MAGIC):
                words = zstandard.ZstdDecompressor().decompressobj().decompress(words)
        self._dictionary = zstandard.ZstdCompressionDict(words) if words else None
        self._padded = False

    def begin(self) -> bool:
        """Begin with the next member, after skippable frames and padding zeros; False if none."""
        if self._padded:
            block = b""
            while not block and (block := self.file.read(_BLOCK)):
                block = block.lstrip(b"\0")
            self.file.seek(-len(block), os.SEEK_CUR)
        while frame := _SKIPPABLE.match(head := self.file.read(8)):
            self.file.seek(int.from_bytes(frame[1], "little"), os.SEEK_CUR)
        self.start = self.file.seek(-len(head), os.SEEK_CUR)
        self._stream, self._rest = self._decompressor(head), b""
        self._padded = self._padded or self.is_gzip
        return self._stream is not None

    def _decompressor(self, head: bytes) -> Any:
        """For the gzip member or zstd frame that begins with `head`; None for anything else."""
        if head and GZIP_MAGIC.startswith(head[:3]):
            return zlib.decompressobj(wbits=31)
        frames = zstandard.ZstdDecompressor(self._dictionary, max_window_size=2**31)
        return frames.decompressobj() if head and ZSTD_MAGIC.startswith(head[:4]) else None

    def read(self, size: int) -> bytes:
        """Some bytes; after the last, the file is at the next record. Raises as `_read` does."""
        data = self._read(size)
        while not data and self._stream and self.joined:
            end = self.file.tell()
            try:
                data = self._read(len(_WARC)) if self.begin() else _WARC
                while 0 < len(data) < len(_WARC) and (more := self._read(len(_WARC) - len(data))):
                    data += more
            except (zlib.error, TruncatedError):
                data = _WARC
            if data.startswith(_WARC):  # a record, other bytes, or damage: left to the next `begin`
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
        """Some bytes of a member. Raises zlib.error if damaged, TruncatedError if the file ends."""
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
        """Move to the next member that begins with a record, from `start` on; False if none."""
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for magic in _MAGIC.finditer(view, start):
                block = view[magic.start() : magic.start() + _BLOCK]
                with suppress(zlib.error, zstandard.ZstdError):  # compressed data may contain the magic bytes
                    if self._decompressor(block).decompress(block).startswith(_WARC):
                        self.file.seek(magic.start())
                        return True
        self.file.seek(0, os.SEEK_END)
        return False


def _truncated(path: Path, start: int) -> TruncatedError:
    return TruncatedError(f"{path}: ends inside the record at byte {start}; fetch it again, or truncate it there")


def _records(stream: Any) -> Iterator[tuple[int, Any]]:
    """Yield (offset, record) of a stream; (offset, None) for other lines up to the next record.

    A line directly after a record means that its Content-Length is wrong. Like warcio, callers may
    ignore the first such line, (offset, False); the next has the offset of the record.
    """
    reader, loader, lost = BufferedReader(stream), ArcWarcRecordLoader(), False
    at, following = 0, 2  # non-blank lines directly after the record; 2 after a blank line
    while line := reader.readline(_BLOCK):
        position = reader.tell() - reader.rem_length() - len(line)
        begins, record = line.startswith(_WARC), None
        if not line.strip():
            following = 2
            continue
        if not begins and following == 0:
            yield position, False
            following = 1
            continue
        if begins or following == 2:
            at = position
        if begins:
            with suppress(ArchiveLoadFailed):
                record = loader.parse_record_stream(reader, line, "warc", no_record_parse=True)
            if record and not str(record.rec_headers.get_header("Content-Length")).isdecimal():
                record = None
        if record or begins or not lost:
            yield at, record
        lost, following = record is None, 0 if record else 2


def complete_records(file: IO[bytes], path: Path, parse: _Parse) -> _Located:
    """Yield (start, end, `parse(record)`) of each gzip member that is one complete record.

    Our archives consist of such members. What lies between them or follows the last is skipped.
    """
    members, at = _Members(file, path, joined=False), 0
    while file.seek(at) == at and (members.begin() or (members.seek(at) and members.begin())):
        start, at, parsed = members.start, members.start + 1, []
        with suppress(zlib.error, TruncatedError):
            for _, record in _records(members):
                if record is not False:
                    parsed.append(_parsed(record, parse))
            if len(parsed) == 1 and parsed[0] is not DAMAGED and members.is_gzip:
                at = file.tell()
                yield start, at, parsed[0]


def _parsed(record: Any, parse: _Parse) -> Any:
    """`parse(record)` of a record that has all its bytes, else DAMAGED; reads it to the end."""
    result = parse(record) if record else DAMAGED
    while record and record.raw_stream.read(_BLOCK):
        pass
    return DAMAGED if record and record.raw_stream.limit else result


def read_records(file: IO[bytes], path: Path, parse: _Parse) -> _Located:
    """Yield (start, end, `parse(record)`) of each record from the file's position on, or DAMAGED.

    Where each record begins a gzip member or zstd frame, damage costs one record. Records that
    begin elsewhere, and those of a plain file, have no end (0). In a plain file a record whose
    Content-Length is wrong is damaged, and the next one is searched for inside it. Raises
    InputError as `read_pages` does.
    """
    reading = _Reading(file, path, parse)
    if not reading.members.begin():
        yield from reading.plain()
    yield from reading.compressed()


class _Reading:
    """One call of `read_records`. What follows a record is read first: it may show damage."""

    def __init__(self, file: IO[bytes], path: Path, parse: _Parse) -> None:
        self.file, self.path, self.parse = file, path, parse
        self.members = _Members(file, path)
        self.size = os.fstat(file.fileno()).st_size
        self.complete = 0  # records that were yielded and are not damaged

    def plain(self) -> _Located:
        """The records of a plain file.

        If the file begins with damage and has a gzip member or zstd frame, ends there.
        """
        first = self.file.tell()
        while (begin := self.file.tell()) < self.size:
            for start, result in self._until_damage(begin):
                if result is not DAMAGED:
                    self.complete += 1
                elif begin == first and not self.complete and self.members.seek(begin + 1):
                    yield begin, 0, DAMAGED
                    return
                else:
                    self._resume_after(start)
                yield start, 0, result

    def _until_damage(self, begin: int) -> Iterator[tuple[int, Any]]:
        """(start, result) of the records of a plain file from `begin` on, up to a damaged one."""
        self.file.seek(begin)
        last: tuple[int, Any] | None = None
        for offset, record in _records(self.file):
            start = begin + offset
            if not record and last and last[0] < start and self._next_record(last[0]) < start:
                last = last[0], DAMAGED  # its Content-Length includes the next record's beginning
                break
            if record is False:
                continue
            if last and last[0] != start:
                yield last
            last = start, _parsed(record, self.parse)
            if last[1] is DAMAGED:
                if record and self._next_record(start) == self.size:
                    raise _truncated(self.path, start)
                break
        if last:
            yield last

    def _next_record(self, start: int) -> int:
        """Where the next record of a plain file begins after `start`, or the end of the file."""
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            line_end = _NEXT.search(view, start)
            return line_end.end() if line_end else len(view)

    def _resume_after(self, damaged: int) -> None:
        """Move to the next record of a plain file. Raises TruncatedError if it ends in a header."""
        following = self._next_record(damaged)
        if following == self.size:
            head = os.pread(self.file.fileno(), _BLOCK, damaged)
            if _WARC.startswith(head[: len(_WARC)]) and b"\n\r\n" not in head:
                raise _truncated(self.path, damaged)
        self.file.seek(following)
        self._require_record()

    def compressed(self) -> _Located:
        """The records of gzip members or zstd frames.

        Raises InputError if a damaged member has parts of several records.
        """
        members = self.members
        while (is_member := members.begin()) or os.pread(self.file.fileno(), 1, members.start):
            start, others, last, cause = members.start, 0, None, ""
            members.spans = is_alone = False  # is_alone: one member has the whole record
            try:
                if not is_member:
                    raise zlib.error("neither gzip nor zstd")
                for offset, record in _records(members):
                    if record is False:
                        continue
                    if last and last[0] != offset:
                        others += 1
                        self.complete += last[1] is not DAMAGED
                        yield start, 0, last[1]
                    last = offset, _parsed(record, self.parse)
                    is_alone = not members.spans
            except zlib.error as error:
                if others or (members.spans and not is_alone):
                    cause = f"damaged after {self.complete} records ({error})"
                    raise InputError(f"{self.path}: {cause}; fetch it again") from None
                if last and members.spans:  # the next member is damaged; it seemed to go on with this record
                    self.complete += last[1] is not DAMAGED
                    yield start, members.start, last[1]
                    start, members.spans = members.start, False
                last, cause = (0, DAMAGED), str(error)
                members.seek(start + 1)
            if last:
                self.complete += last[1] is not DAMAGED
                self._require_record(cause)
                yield start, 0 if others or members.spans else self.file.tell(), last[1]

    def _require_record(self, cause: str = "") -> None:
        """Raise InputError at the end of a file without a complete record."""
        if self.complete or os.pread(self.file.fileno(), 1, self.file.tell()):
            return
        packing, head = read_head(self.path)
        cause = cause or f"{kind_of(head)[0] or 'another format'}{packing and f', {packing}-compressed'}"
        raise InputError(f"{self.path}: no WARC record inside ({cause}); name only WARC files, or fetch it again")
