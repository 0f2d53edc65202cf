"""WARC files: the pages of `response` records and the position of every record, and the archive that a crawl writes.

    for url, page in read_pages(Path("CC-MAIN-00001.warc.gz"), max_bytes=10_000_000): ...

warcio parses the records; offsets, resynchronisation after damage and checks for truncation are ours. fastwarc 2.0.1
reads a record of 4 KB in 15 us instead of 51 us (extraction takes 2,000 us), but its iterator ends at the first damaged
record, and it returns the half of a record with which a truncated .gz or plain file ends as if it were whole.
"""

import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import zstandard
from warcio.bufferedreaders import BufferedReader
from warcio.exceptions import ArchiveLoadFailed
from warcio.recordloader import ArcWarcRecordLoader
from warcio.statusandheaders import StatusAndHeaders, StatusAndHeadersParser
from warcio.warcwriter import WARCWriter

from common.console import warn
from common.errors import InputError, PageError, TruncatedError
from common.files import LONGEST_LINE, is_binary, kind_of, output_files, read_head
from corpus.index.layout import RECORDS
from corpus.scrape.journal import key_of
from corpus.scrape.pages import Outcome
from corpus.scrape.response import PAGE_TYPES, FetchedPage, codings, decode_body, media_type, unchunked
from corpus.urls.url import document_id

REQUESTED_HEADER = "X-Requested-URI"
"""The URL requested, if it differs from WARC-Target-URI; only our archives have it."""
GZIP_MAGIC = b"\x1f\x8b\x08"  # the first bytes of a gzip member
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18(.{4})", re.DOTALL)  # magic and size of a zstd frame without text
_DICTIONARY = b"\x5d\x2a\x4d\x18"  # magic of the skippable frame with the dictionary of a .warc.zst, by IIPC's draft
_WARC = b"WARC/"
_MEMBER = re.compile(rb"\x1f\x8b\x08|\x28\xb5\x2f\xfd")
DAMAGED = object()
"""Takes the place of records that cannot be read."""
_BLOCK = 1 << 16  # bytes read at a time
_ZSTD_BLOCK = 1 << 10  # zstandard has no output limit: at most some 30 MB of a record that is all alike
_TORN_INFO = 1024  # bytes; a longer file without a complete record is not ours, but of another kind
_BLANK = b"\xef\xbb\xbf \t\r\n"  # before the first tag: white space and UTF-8's byte-order mark
_GZIP = type(zlib.decompressobj())
_HTTP = StatusAndHeadersParser([], verify=False)


class _Member:
    """One gzip member or zstd frame of an open file, as a file. After it is read, the file is at the next one."""

    def __init__(self, file: IO[bytes], path: Path, stream: Any) -> None:
        self._file, self._path, self._start = file, path, file.tell()
        self._stream, self._rest = stream, b""

    def read(self, size: int) -> bytes:
        """Some bytes. Raises zlib.error for a damaged member, TruncatedError if the file ends inside it."""
        is_gzip = isinstance(self._stream, _GZIP)
        while not self._stream.eof:
            packed = self._rest or self._file.read(_BLOCK if is_gzip else _ZSTD_BLOCK)
            try:
                data: bytes = self._stream.decompress(packed, size) if is_gzip else self._stream.decompress(packed)
            except zstandard.ZstdError as error:
                raise zlib.error(str(error)) from None
            self._rest = self._stream.unconsumed_tail
            if self._stream.eof:
                self._file.seek(-len(self._stream.unused_data), os.SEEK_CUR)
            elif not packed and not data:
                raise _truncated(self._path, self._start)
            if data:
                return data
        return b""


class _Packed:
    """The gzip members and zstd frames of an open file from one with a record on, up to the next that a record begins.

    Most writers begin one per record; bgzip and others begin them anywhere, and some add empty ones. After all is read,
    the file is at the next record.
    """

    def __init__(self, source: "_Source", member: _Member) -> None:
        self._source, self._member, self._data = source, member, b""
        self.spans = False
        """Whether there is text in more than one member."""

    def read(self, size: int) -> bytes:
        """Some bytes. Raises as `_Member.read` does."""
        while not (data := self._data or self._member.read(size)):
            start = self._source.file.tell()
            following, data = self._source.member(), b""
            try:
                while following and len(data) < len(_WARC) and (more := following.read(len(_WARC) - len(data))):
                    data += more
            except (zlib.error, TruncatedError):
                following = None  # its own damage
            if following is None or data.startswith(_WARC):
                self._source.file.seek(start)
                return b""
            self._member, self._data, self.spans = following, data, self.spans or bool(data)
        self._data = b""
        return data


class _Source:
    """An open WARC file: where its members begin, and the zstd dictionary of all."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.file, self.path = file, path
        self.damage = ""
        """Why what was read last cannot be decompressed."""
        start, self._dictionary = file.tell(), None
        file.seek(0)
        if (found := _SKIPPABLE.match(file.read(8))) and found[0].startswith(_DICTIONARY):
            content = file.read(int.from_bytes(found[1], "little"))
            try:
                if content.startswith(_ZSTD_MAGIC):
                    content = zstandard.ZstdDecompressor().decompressobj().decompress(content)
                self._dictionary = zstandard.ZstdCompressionDict(content)
            except zstandard.ZstdError as error:
                raise InputError(f"{path}: damaged zstd dictionary ({error}); fetch it again") from None
        file.seek(start)

    def _opened(self, head: bytes) -> Any:
        """A decompressor for the gzip member or zstd frame that begins with `head`; None for anything else."""
        if head and GZIP_MAGIC.startswith(head[:3]):
            return zlib.decompressobj(wbits=31)
        if head and _ZSTD_MAGIC.startswith(head[:4]):
            return zstandard.ZstdDecompressor(self._dictionary, max_window_size=2**31).decompressobj()
        return None

    def member(self) -> _Member | None:
        """The gzip member or zstd frame at the file's position, after skippable frames; None for anything else."""
        while found := _SKIPPABLE.match(head := self.file.read(8)):
            self.file.seek(int.from_bytes(found[1], "little"), os.SEEK_CUR)
        self.file.seek(-len(head), os.SEEK_CUR)
        stream = self._opened(head)
        return _Member(self.file, self.path, stream) if stream else None

    def seek_record(self, start: int) -> bool:
        """Move to the next member that a record begins, at `start` or later; False if there is none."""
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for found in _MEMBER.finditer(view, start):
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

    Without a blank line after a record its Content-Length is wrong: as in warcio, one line more is ignored; if more
    follow, they are yielded with the offset of the record.
    """
    reader, loader, lost = BufferedReader(stream), ArcWarcRecordLoader(), False
    at, behind = 0, 2  # lines behind the record, 2 after a blank one
    while line := reader.readline(_BLOCK):
        begins, record = line.startswith(_WARC), None
        if not line.strip() or (not begins and behind == 0):
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


def _located(source: "_Source", parse: Callable[[Any], Any]) -> Iterator[tuple[int, int, Any]]:
    """`read_records` of an open file."""
    file, path, compressed, total = source.file, source.path, False, 0
    while True:
        member, start = source.member(), file.tell()
        if member is None and not os.pread(file.fileno(), 1, start):
            return
        packed = _Packed(source, member) if member else None
        compressed = compressed or packed is not None
        count, held = 0, None
        try:
            if compressed and not packed:
                raise zlib.error("neither gzip nor zstd")
            for at, record in _records(packed or file):
                if held and held[0] != at:
                    count, total = count + 1, total + 1
                    yield start if packed else start + held[0], 0, held[1]
                held = at, DAMAGED if record is None else parse(record)
                while record and record.raw_stream.read(_BLOCK):
                    pass
                if record and record.raw_stream.limit:  # fewer bytes than Content-Length
                    if not packed:
                        raise _truncated(path, start + at)
                    held = at, DAMAGED
        except zlib.error as error:
            if count or (packed and packed.spans):
                raise InputError(f"{path}: damaged after {total} records ({error}); fetch it again") from None
            source.damage = str(error)
            source.seek_record(start + 1)
            yield start, file.tell(), DAMAGED
            continue
        if held and held[1] is DAMAGED and not packed:
            if not count and source.seek_record(start + 1):  # of a damaged member
                yield start, file.tell(), DAMAGED
                continue
            tail = os.pread(file.fileno(), _BLOCK, start + held[0])
            if _WARC.startswith(tail[: len(_WARC)]) and b"\n\r\n" not in tail:
                raise _truncated(path, start + held[0])
        if held:  # only now is the checksum of a single record verified
            total += 1
            alone = packed and not count and not packed.spans
            yield start if packed else start + held[0], file.tell() if alone else 0, held[1]


def read_records(file: IO[bytes], path: Path, parse: Callable[[Any], Any]) -> Iterator[tuple[int, int, Any]]:
    """Yield (start, end, `parse(record)`) of each record from the file's position on; DAMAGED for damaged ones.

    Where each record begins a gzip member or zstd frame, damage costs one record. Records that begin elsewhere, and
    those of a plain file, have no end (0). Raises InputError as `read_pages` does.
    """
    source, damaged, found = _Source(file, path), list[tuple[int, int, Any]](), False
    for item in _located(source, parse):
        if item[2] is DAMAGED and not found:
            damaged.append(item)
            continue
        if not found:
            yield from damaged
            found = True
        yield item
    if damaged and not found:
        packing, head = read_head(path)
        kind = f"{packing}-compressed" if packing in (".bz2", ".xz") else kind_of(head)[0]
        cause = source.damage or kind or "another format"
        raise InputError(f"{path}: no WARC record inside ({cause}); name only WARC files, or fetch it again")


def read_pages(path: Path, max_bytes: int, texts: bool = False) -> Iterator[tuple[str, FetchedPage | Outcome | str]]:
    """Yield every response of a WARC file (plain, .gz or .zst) in order: its URL, and its page or why it has none.

    A damaged record of a compressed file (`damaged`) costs only itself. With `texts`, each `conversion` record, of
    which WET files consist, is yielded as a document. Raises InputError for a file that is not WARC, is truncated, or
    is damaged in another way.
    """

    def parse(record: Any) -> tuple[str, FetchedPage | Outcome | str] | None:
        if texts and record.rec_type == "conversion":
            return parse_text(record)
        return parse_response(record, max_bytes) if record.rec_type == "response" else None

    with path.open("rb") as file:
        for start, _, response in read_records(file, path, parse):
            if response is DAMAGED:
                warn(f"{path}: the record at byte {start} is damaged and left out")
                yield "", "damaged"
            elif response is not None:
                url, found = response
                if isinstance(found, FetchedPage):
                    found = replace(found, origin=f"{path}:{start}")
                elif not isinstance(found, str):
                    found["record"]["origin"] = f"{path}:{start}"
                yield url, found


def parse_text(record: Any) -> tuple[str, Outcome | str]:
    """The URL of a `conversion` record, and its document, with date and language under `meta`, or why it has none."""
    url = record.rec_headers.get_header("WARC-Target-URI", "")
    text = record.raw_stream.read(LONGEST_LINE + 1)
    if len(text) > LONGEST_LINE:
        return url, "too_large"
    named = {"date": "WARC-Date", "language": "WARC-Identified-Content-Language"}
    meta = {key: value for key, name in named.items() if (value := record.rec_headers.get_header(name))}
    try:
        record = {"text": text.decode(), "url": url, "meta": meta}
        return url, {"record": record, "bytes": len(text), "date": meta.get("date", "")[:10]}
    except UnicodeDecodeError:
        return url, "bad_encoding"


def parse_request(record: Any) -> str | None:
    """The requested URL of a `response` record; None for other records."""
    headers = record.rec_headers
    url = headers.get_header(REQUESTED_HEADER) or headers.get_header("WARC-Target-URI", "")
    return str(url) if record.rec_type == "response" else None


def parse_response(record: Any, max_bytes: int) -> tuple[str, FetchedPage | str]:
    """The requested URL of a `response` record, and its page or why it has none."""
    url = record.rec_headers.get_header("WARC-Target-URI", "")
    requested = record.rec_headers.get_header(REQUESTED_HEADER, url)
    try:
        return requested, _page(record, url, requested, max_bytes)
    except PageError as error:
        return requested, error.reason
    except (EOFError, ValueError):
        return requested, "bad_response"


def _page(record: Any, url: str, requested: str, max_bytes: int) -> FetchedPage:
    """The page of a record, by the rules of a crawl. Raises PageError, or EOFError or ValueError if it is not HTTP."""
    if not url.startswith(("http:", "https:")):
        raise PageError("scheme")  # dns:, whois:
    http = _HTTP.parse(record.raw_stream)
    status = int(http.get_statuscode())
    if status not in (200, 203):
        raise PageError(f"http_{status}")
    if record.rec_headers.get_header("WARC-Truncated"):
        raise PageError("truncated")
    content_type, essence = media_type(http.headers)
    if essence not in PAGE_TYPES:
        raise PageError("content_type")
    raw = record.raw_stream.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise PageError("too_large")
    raw, encoding = unchunked(raw, http.headers), codings(http.headers)
    try:
        body = decode_body(raw, encoding, max_bytes)
    except PageError as error:
        # Common Crawl stores decoded bodies; until August 2018 (CC-NEWS: May 2019) it left the original headers
        decoded = raw[:64].lstrip(_BLANK).startswith(b"<") or ("gzip" in encoding.lower() and raw[:3] != GZIP_MAGIC)
        if error.reason != "bad_encoding" or not decoded:
            raise
        body = raw
    if is_binary(body):
        raise PageError("content_type")
    return FetchedPage(
        url=url,
        status=status,
        reason=http.statusline.partition(" ")[2],
        headers=tuple(http.headers),
        content_type=content_type,
        raw=raw,
        body=body,
        requested=requested,
        archived=True,
        date=record.rec_headers.get_header("WARC-Date", "")[:10],
    )


# ------------------------------------------------------------------------------------------------ writing


def write_records(archive: Path, responses: Mapping[str, int]) -> None:
    """Write ARCHIVE.records, in which `corpus.index.documents` finds the record of a page: see docs/formats.md.

    `responses`: for each URL, the offset of its last record.
    """
    found = sorted((int(document_id(url), 16), start) for url, start in responses.items())
    with output_files([archive.with_name(archive.name + RECORDS)]) as (output,):
        output.append(np.array(found, "<u8").reshape(-1, 2).T.tobytes())


class Archive:
    """An open archive: a WARC 1.0 file of raw responses, one gzip member per record, only ever appended to.

        archive.warc.gz = warcinfo record, then one `response` record per fetched page

    WARC-Target-URI is the URL that answered. X-Requested-URI is the URL requested, if that differs by redirects or
    spelling, so that documents keep their URLs. Opening reads the whole file into `responses`, and cuts off a torn
    record at its end. Raises InputError for a file of another kind.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.responses: dict[str, int] = {}
        """For each URL (its `key_of`), the offset of its last record."""
        if path.exists() and (size := path.stat().st_size):
            valid_end = self._scan()
            if valid_end < size:
                os.truncate(path, valid_end)
        self._file: IO[bytes] | None = None  # opened by the first write
        self._reader: IO[bytes] | None = None

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        for file in (self._file, self._reader):
            if file is not None:
                file.close()

    def _scan(self) -> int:
        """Fill `responses`; returns the end of the last complete record."""
        valid_end = 0
        with self.path.open("rb") as file:
            head = file.read(len(GZIP_MAGIC))
            if not GZIP_MAGIC.startswith(head):
                raise InputError(f"{self.path}: not a .warc.gz file to append to; name another file")
            file.seek(0)
            try:
                for record_start, record_end, request in read_records(file, self.path, parse_request):
                    if request is not DAMAGED and not record_end:
                        raise InputError(f"{self.path}: many records in one gzip member; name another file")
                    if request is not DAMAGED:
                        valid_end = record_end
                        if request is not None:
                            with suppress(ValueError):  # not a URL
                                self.responses[key_of(request)] = record_start
            except TruncatedError:
                pass
        if valid_end == 0 and self.path.stat().st_size > _TORN_INFO:
            raise InputError(f"{self.path}: not a WARC file; name another file")
        return valid_end

    def _open(self) -> IO[bytes]:
        """Open the file to append to; a new one begins with a warcinfo record."""
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by __exit__
        self._writer = WARCWriter(self._file, gzip=True)
        if self._file.tell() == 0:
            about = {"software": "urls-to-gpt2", "format": "WARC File Format 1.0"}
            self._writer.write_record(self._writer.create_warcinfo_record(self.path.name, about))
            self._file.flush()
        return self._file

    def append(self, page: FetchedPage) -> None:
        """Append a response."""
        file = self._file or self._open()
        start = file.tell()
        # The body is stored without chunks, so the header that announces them is dropped.
        framing = ("chunked", "identity")
        headers = [
            (name, value)
            for name, value in page.headers
            if name.lower() != "transfer-encoding" or value.strip().lower() not in framing
        ]
        status = StatusAndHeaders(f"{page.status} {page.reason}".strip(), headers, protocol="HTTP/1.1")
        record = self._writer.create_warc_record(
            page.url,
            "response",
            payload=BytesIO(page.raw),
            length=len(page.raw),
            http_headers=status,
            warc_headers_dict={REQUESTED_HEADER: page.requested} if page.requested != page.url else {},
        )
        self._writer.write_record(record)
        file.flush()
        self.responses[key_of(page.requested or page.url)] = start

    def read(self, key: str, max_bytes: int) -> FetchedPage | str:
        """The page of a URL in `responses`, or why it has none. Raises InputError if it is damaged."""
        if self._reader is None:
            self._reader = open(self.path, "rb")  # noqa: SIM115 - closed by __exit__
        start = self.responses[key]
        self._reader.seek(start)
        records = read_records(self._reader, self.path, lambda record: parse_response(record, max_bytes))
        for _, _, response in records:
            if response is not DAMAGED:
                return cast(FetchedPage | str, response[1])
            break
        raise InputError(f"{self.path}: the record at byte {start} ({key}) has changed; run it again")

    def sync(self) -> None:
        """Wait until all records are on disk; may be called from another thread."""
        if self._file is not None:
            os.fsync(self._file.fileno())
