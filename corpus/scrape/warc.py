"""Read the pages of WARC files, with the position of each record, and append to the archive of a crawl.

    for url, page in read_pages(Path("CC-MAIN-00001.warc.gz"), max_bytes=10_000_000): ...

warcio parses the records; members, offsets and recovery from damage are ours. fastwarc 2.0.1 saves 40 us per
record (extraction takes 2,000 us), but ends at the first damaged record, and accepts half of a truncated one.
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
from corpus.scrape.response import PAGE_TYPES, FetchedPage, decode_body, media_type, unframed
from corpus.urls.url import document_id

REQUESTED_HEADER = "X-Requested-URI"
"""The URL requested, if it differs from WARC-Target-URI; only our archives have it."""
GZIP_MAGIC = b"\x1f\x8b\x08"  # the first bytes of a gzip member
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAGIC = re.compile(rb"\x1f\x8b\x08|\x28\xb5\x2f\xfd")
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18(.{4})", re.DOTALL)  # a zstd frame without text: magic, size
_DICTIONARY = b"\x5d\x2a\x4d\x18"  # of the skippable frame with the zstd dictionary of a file, by IIPC's draft
_WARC = b"WARC/"
DAMAGED = object()
"""Takes the place of a record that cannot be read."""
_BLOCK = 1 << 16  # bytes read at a time
_ZSTD_BLOCK = 1 << 10  # zstandard has no output limit: at most some 30 MB of a record that is all alike
_TORN_INFO = 1024  # bytes; a longer file without a complete record is not ours, but of another kind
_BLANK = b"\xef\xbb\xbf \t\r\n"  # before the first tag: white space and UTF-8's byte-order mark
_GZIP = type(zlib.decompressobj())
_HTTP = StatusAndHeadersParser([], verify=False)


class _Members:
    """Gzip members or zstd frames of an open file, as a file that ends before the next member that begins a record.

    Most writers begin one per record; bgzip and others begin them anywhere, and some add empty ones.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.file, self.path, self.spans = file, path, False
        begin = file.tell()
        file.seek(0)
        head = file.read(8)
        words = file.read(int.from_bytes(head[4:], "little")) if head.startswith(_DICTIONARY) else b""
        file.seek(begin)
        with suppress(zstandard.ZstdError):  # without it, frames are damaged
            if words.startswith(_ZSTD_MAGIC):
                words = zstandard.ZstdDecompressor().decompressobj().decompress(words)
        self._dictionary = zstandard.ZstdCompressionDict(words) if words else None

    def begin(self) -> bool:
        """Begin with the member at the file's position, after skippable frames; False if there is none."""
        while found := _SKIPPABLE.match(head := self.file.read(8)):
            self.file.seek(int.from_bytes(found[1], "little"), os.SEEK_CUR)
        self.start = self.file.seek(-len(head), os.SEEK_CUR)
        self._stream, self._rest = self._opened(head), b""
        return self._stream is not None

    def _opened(self, head: bytes) -> Any:
        """A decompressor for the gzip member or zstd frame that begins with `head`; None for anything else."""
        if head and GZIP_MAGIC.startswith(head[:3]):
            return zlib.decompressobj(wbits=31)
        frames = zstandard.ZstdDecompressor(self._dictionary, max_window_size=2**31)
        return frames.decompressobj() if head and _ZSTD_MAGIC.startswith(head[:4]) else None

    def read(self, size: int) -> bytes:
        """Some bytes. After all are read, the file is at the next record. Raises as `_read` does."""
        data = self._read(size)
        while not data and self._stream:
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

    def _read(self, size: int) -> bytes:
        """Some bytes of a member. Raises zlib.error if it is damaged, TruncatedError if the file ends inside it."""
        is_gzip = isinstance(self._stream, _GZIP)
        while self._stream and not self._stream.eof:
            packed = self._rest or self.file.read(_BLOCK if is_gzip else _ZSTD_BLOCK)
            try:
                data: bytes = self._stream.decompress(packed, size) if is_gzip else self._stream.decompress(packed)
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

    Without a blank line after a record its Content-Length is wrong: as in warcio, one line more is ignored; if more
    follow, they have the offset of the record.
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


def read_records(file: IO[bytes], path: Path, parse: Callable[[Any], Any]) -> Iterator[tuple[int, int, Any]]:
    """Yield (start, end, `parse(record)`) of each record from the file's position on; DAMAGED for damaged ones.

    Where each record begins a gzip member or zstd frame, damage costs one record. Records that begin elsewhere, and
    those of a plain file, have no end (0). Raises InputError as `read_pages` does.
    """
    members, total, compressed = _Members(file, path), 0, False
    while (packed := members.begin()) or os.pread(file.fileno(), 1, members.start):
        start, count, held, whole, cause = members.start, 0, None, False, ""
        compressed, members.spans = compressed or packed, False
        try:
            if compressed and not packed:
                raise zlib.error("neither gzip nor zstd")
            for at, record in _records(members if packed else file):
                if held and held[0] != at:
                    count, total = count + 1, total + (held[1] is not DAMAGED)
                    yield start if packed else start + held[0], 0, held[1]
                held = at, DAMAGED if record is None else parse(record)
                while record and record.raw_stream.read(_BLOCK):
                    pass
                if record and record.raw_stream.limit:  # fewer bytes than Content-Length
                    if not packed:
                        raise _truncated(path, start + at)
                    held = at, DAMAGED
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
            if not count and members.seek(start + 1):
                held = 0, DAMAGED
            elif _WARC.startswith(tail[: len(_WARC)]) and b"\n\r\n" not in tail:
                raise _truncated(path, start + held[0])
        if held:  # only now is the checksum of a single record verified
            total += held[1] is not DAMAGED
            if not total and not os.pread(file.fileno(), 1, file.tell()):
                packing, head = read_head(path)
                cause = cause or f"{kind_of(head)[0] or 'another format'}{packing and f', {packing}-compressed'}"
                raise InputError(f"{path}: no WARC record inside ({cause}); name only WARC files, or fetch it again")
            end = file.tell() if compressed and not count and not members.spans else 0
            yield start if packed else start + held[0], end, held[1]


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
    raw, encoding = unframed(raw, http.headers)
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
                    if request is DAMAGED:
                        continue
                    if not (valid_end := record_end):
                        raise InputError(f"{self.path}: many records in one gzip member; name another file")
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
        framing = {("transfer-encoding", "chunked"), ("transfer-encoding", "identity")}
        headers = [pair for pair in page.headers if (pair[0].lower(), pair[1].strip().lower()) not in framing]
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
