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


def _is_whole(record: Any) -> bool:
    """Read the rest of a record; returns whether it has as many bytes as its Content-Length says."""
    while record.raw_stream.read(_BLOCK):
        pass
    return not record.raw_stream.limit


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
                    found.append(parse(record) if record else DAMAGED)
                if record and not _is_whole(record):
                    found.append(DAMAGED)
            if len(found) == 1 and found[0] is not DAMAGED and members.is_gzip:
                at = file.tell()
                yield start, at, found[0]


def read_records(file: IO[bytes], path: Path, parse: Callable[[Any], Any]) -> Iterator[tuple[int, int, Any]]:
    """Yield (start, end, `parse(record)`) of each record from the file's position on; DAMAGED for damaged ones.

    Where each record begins a gzip member or zstd frame, damage costs one record. Records that begin elsewhere, and
    those of a plain file, have no end (0). In a plain file a record whose Content-Length is wrong is damaged, and the
    next one is searched for inside it. Raises InputError as `read_pages` does.
    """
    reading = _Reading(file, path, parse)
    if not reading.members.begin():
        yield from reading.plain()  # up to the first member, if only the beginning of a compressed file is damaged
    yield from reading.compressed()


class _Reading:
    """One call of `read_records`.

    A record is yielded when the next one begins: only then is it known that its length is right, and its checksum.
    """

    def __init__(self, file: IO[bytes], path: Path, parse: Callable[[Any], Any]) -> None:
        self.file, self.path, self.parse = file, path, parse
        self.members = _Members(file, path)
        self.size = os.fstat(file.fileno()).st_size
        self.complete = 0
        """Records that were yielded and are not damaged."""

    def plain(self) -> Iterator[tuple[int, int, Any]]:
        """The records of a plain file; after a damaged one, reading goes on at the next line that begins a record.

        Ends at the first gzip member or zstd frame if the file begins with damage and has one.
        """
        first = self.file.tell()
        while (begin := self.file.tell()) < self.size:
            for start, result in self._until_damage(begin):
                if result is DAMAGED:
                    if begin == first and not self.complete and self.members.seek(begin + 1):
                        yield begin, 0, DAMAGED
                        return
                    self._resume_after(start)
                self.complete += result is not DAMAGED
                yield start, 0, result

    def _until_damage(self, begin: int) -> Iterator[tuple[int, Any]]:
        """(start, result) of the records of a plain file from `begin` on, up to the first damaged one."""
        self.file.seek(begin)
        last: tuple[int, Any] | None = None
        for offset, record in _records(self.file):
            start = begin + offset
            if not record and last and last[0] < start and self._next_record(last[0]) < start:
                last = last[0], DAMAGED  # its Content-Length includes the beginning of another record
                break
            if record is False:
                continue
            if last and last[0] != start:
                yield last
            last = start, self.parse(record) if record else DAMAGED
            if not record:
                break
            if not _is_whole(record):
                if self._next_record(start) == self.size:
                    raise _truncated(self.path, start)
                last = start, DAMAGED
                break
        if last:
            yield last

    def _resume_after(self, damaged: int) -> None:
        """Move to the record after a damaged one of a plain file. Raises TruncatedError if the file ends in its head."""
        following = self._next_record(damaged)
        if following == self.size:
            head = os.pread(self.file.fileno(), _BLOCK, damaged)
            if _WARC.startswith(head[: len(_WARC)]) and b"\n\r\n" not in head:
                raise _truncated(self.path, damaged)
        self.file.seek(following)
        self._require_record()

    def _next_record(self, start: int) -> int:
        """Where the next record of a plain file begins after `start`, or the end of the file."""
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            found = _NEXT.search(view, start)
            return found.end() if found else len(view)

    def compressed(self) -> Iterator[tuple[int, int, Any]]:
        """The records of gzip members or zstd frames; after a damaged one, reading goes on at the next member.

        Raises InputError if a damaged member holds more than one record, or less.
        """
        members = self.members
        while (is_member := members.begin()) or os.pread(self.file.fileno(), 1, members.start):
            start, others, last, cause = members.start, 0, None, ""
            members.spans = is_alone = False
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
                    last = offset, self.parse(record) if record else DAMAGED
                    if record and not _is_whole(record):
                        last = offset, DAMAGED
                    is_alone = not members.spans
            except zlib.error as error:
                if others or (members.spans and not is_alone):
                    raise InputError(
                        f"{self.path}: damaged after {self.complete} records ({error}); fetch it again"
                    ) from None
                if last and members.spans:  # the damage is in the next member, which seemed to begin no record
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
