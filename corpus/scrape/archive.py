"""Raw responses as WARC files: written by a crawl (1.0, one gzip member a record), read from anywhere.

    archive.warc.gz = warcinfo record, then one `response` record a fetched page

WARC-Target-URI is the URL that answered. The one that was asked for stands in X-Requested-URI where redirects, or only
its spelling, make it another: so the pages of an archive keep their names. X-Robots-Policy: ignore stands where
robots.txt was not asked (scrape.obey_robots: false).
"""

import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from warcio.archiveiterator import WARCIterator
from warcio.bufferedreaders import ChunkedDataReader
from warcio.exceptions import ArchiveLoadFailed
from warcio.statusandheaders import StatusAndHeaders, StatusAndHeadersParser
from warcio.warcwriter import WARCWriter

from common.console import warn
from common.errors import InputError, PageError
from corpus.scrape.content_coding import decode_body
from corpus.scrape.fetch import BINARY, PAGE_TYPES, Page

_REQUESTED = "X-Requested-URI"
_ROBOTS = "X-Robots-Policy"  # "ignore" where robots.txt was not asked; our archives alone say so
_TORN_INFO = 1024  # bytes; a file without one whole record is no longer than that when its first write was cut off
_DAMAGED = object()
_MEMBER = b"\x1f\x8b\x08"  # the first bytes of a gzip member
_BLOCK = 1 << 16  # bytes read at a time
_BLANK = b"\xef\xbb\xbf \t\r\n"  # before the first tag, with UTF-8's byte-order mark
_HTTP = StatusAndHeadersParser([], verify=False)


class Recorded(NamedTuple):
    """A response in a file of ours."""

    url: str
    """The one that was asked for."""
    start: int
    """Offset of its record, and of the next one."""
    end: int
    obeyed: bool
    """Whether robots.txt was asked before it was fetched."""


class Archive:
    """An open WARC file, which is only ever appended to. `end` is its length after the last response that is known.

    What follows it is looked through: `found` has its responses, and a torn record at the end is cut off. Raises
    InputError for a file that is shorter than `end`, or of another kind.
    """

    def __init__(self, path: Path, end: int, obey_robots: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = path.stat().st_size if path.exists() else 0
        if size < end:
            raise InputError(
                f"{path}: shorter than the journal of this scrape says; put the whole file back, or move it away to "
                "keep the known pages without it"
            )
        self.path, self._obey_robots = path, obey_robots
        self.found: list[Recorded] = []
        whole = end if size == end else self._look_through(end)
        if whole < size:
            os.truncate(path, whole)
        self._file: IO[bytes] | None = None  # until there is something to write
        self._reader: IO[bytes] | None = None

    def __enter__(self) -> "Archive":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sync()
        for file in (self._file, self._reader):
            if file is not None:
                file.close()

    def _open(self) -> IO[bytes]:
        """The file to append to; a new one begins with a record about itself."""
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by __exit__
        self._writer = WARCWriter(self._file, gzip=True)
        if self._file.tell() == 0:
            about = {"software": "urls-to-gpt2", "format": "WARC File Format 1.0"}
            self._writer.write_record(self._writer.create_warcinfo_record(self.path.name, about))
            self._file.flush()
        return self._file

    def _look_through(self, start: int) -> int:
        """Fill `found` from the records from `start` on; the end of the last one that is whole."""
        whole = start
        with self.path.open("rb") as file:
            head = file.read(len(_MEMBER))
            if not _MEMBER.startswith(head):
                raise InputError(f"{self.path}: no .warc.gz that can be appended to; name another file")
            file.seek(start)
            try:
                for at, end, found in _walk(file, self.path, _identity):
                    if found is not _DAMAGED:
                        if end <= whole:  # or its records could not be read one by one
                            raise InputError(f"{self.path}: many records in one gzip member; read it with --warc")
                        whole = end
                        if found is not None:
                            self.found.append(Recorded(found[0], at, end, found[1]))
            except _Truncated:
                pass
        if whole == 0 and self.path.stat().st_size > _TORN_INFO:
            raise InputError(f"{self.path}: no WARC file; name another file")
        return whole

    def append(self, page: Page) -> tuple[int, int]:
        """Write one response; the offset of its record, and the new length of the file."""
        file = self._file or self._open()
        start = file.tell()
        # The body is stored without its chunks, so the header that announces them goes, too.
        headers = [(name, value) for name, value in page.headers if name.lower() != "transfer-encoding"]
        status = StatusAndHeaders(f"{page.status} {page.reason}".strip(), headers, protocol="HTTP/1.1")
        record = self._writer.create_warc_record(
            page.url,
            "response",
            payload=BytesIO(page.raw),
            length=len(page.raw),
            http_headers=status,
            warc_headers_dict={
                **({_REQUESTED: page.requested} if page.requested != page.url else {}),
                **({} if self._obey_robots else {_ROBOTS: "ignore"}),
            },
        )
        self._writer.write_record(record)
        file.flush()
        return start, file.tell()

    def read(self, start: int, max_bytes: int) -> tuple[str, Page | str] | None:
        """URL and page (or the reason why there is none) of the record at an offset; None where it is damaged."""
        if self._reader is None:
            self._reader = open(self.path, "rb")  # noqa: SIM115 - closed by __exit__
        self._reader.seek(start)
        try:
            _, _, answer = next(_walk(self._reader, self.path, lambda record: _response(record, max_bytes)))
        except (StopIteration, InputError):
            return None
        return None if answer is _DAMAGED else answer

    def sync(self) -> None:
        """Wait until the disk has every record; safe to call from another thread."""
        if self._file is not None:
            os.fsync(self._file.fileno())


# ------------------------------------------------------------------------------------------------ reading


class _Member:
    """One gzip member of an open file, read like a file; read to its end, it leaves the file at the next one."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path, self._start = file, path, file.tell()
        self._stream = zlib.decompressobj(wbits=31)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes. Raises zlib.error for a damaged member, InputError where the file ends inside it."""
        while not self._stream.eof:
            packed = self._stream.unconsumed_tail or self._file.read(_BLOCK)
            data = self._stream.decompress(packed, size)
            if self._stream.eof:
                self._file.seek(-len(self._stream.unused_data), os.SEEK_CUR)
            elif not packed and not data:
                raise _truncated(self._path, self._start)
            if data:
                return data
        return b""


class _Truncated(InputError):
    """The file ends in the middle of a record."""


def _truncated(path: Path, start: int) -> InputError:
    return _Truncated(f"{path}: ends inside the record at byte {start}; fetch it again, or cut the file there")


def _seek_member(file: IO[bytes], start: int) -> None:
    """Move an open file to the first gzip member from `start` on that holds a record, or to its end."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        while (start := view.find(_MEMBER, start)) >= 0:
            try:
                if zlib.decompressobj(wbits=31).decompress(view[start : start + _BLOCK], 5) == b"WARC/":
                    file.seek(start)
                    return
            except zlib.error:
                pass  # these bytes stand anywhere in compressed data
            start += 1
    file.seek(0, os.SEEK_END)


def _walk(file: IO[bytes], path: Path, read: Callable[[Any], Any]) -> Iterator[tuple[int, int, Any]]:
    """(start, end, `read` of it) of each record from where the file stands; _DAMAGED instead of what `read` found.

    A damaged record costs no other one where each is a gzip member of its own. Where one member has many, they all
    start at its start, and the end is 0 for all but the last. Raises InputError as `read_pages` does.
    """
    while first := file.read(len(_MEMBER)):
        start = file.seek(-len(first), os.SEEK_CUR)
        packed = _MEMBER.startswith(first)
        # no_record_parse: an empty HTTP message would end the iteration
        records = WARCIterator(_Member(file, path) if packed else file, no_record_parse=True)
        count = 0
        pending: tuple[int, Any] | None = None  # its end is known, and its checksum right, when the next one begins
        try:
            for record in records:
                if pending is not None:
                    yield pending[0], 0, pending[1]
                    pending = None
                where = start if packed else records.offset
                count += 1
                found = read(record)
                records.read_to_end()
                if record.length is None or record.raw_stream.limit:  # fewer bytes than Content-Length says
                    if not packed:
                        raise _truncated(path, where)
                    raise zlib.error
                pending = (where, found)
        except (ArchiveLoadFailed, zlib.error) as error:
            is_one_record = count <= 1 if isinstance(error, zlib.error) else start > 0 and count == 0
            if not is_one_record:
                if pending is not None:
                    yield pending[0], 0, pending[1]
                raise InputError(f"{path}: no WARC record after the first {count}; fetch it again") from None
            _seek_member(file, start + 1)
            yield start, file.tell(), _DAMAGED
        else:
            if pending is not None:
                yield pending[0], file.tell(), pending[1]


def read_pages(path: Path, max_bytes: int) -> Iterator[tuple[str, Page | str]]:
    """Every response of a WARC file (plain or .gz), in order: its URL, and the page or the reason why there is none.

    A damaged record (`damaged`) costs no other one where each is a gzip member of its own. Raises InputError for a
    file that is no WARC, is cut off, or is damaged otherwise.
    """
    with path.open("rb") as file:
        for start, _, answer in _walk(
            file, path, lambda record: _response(record, max_bytes) if record.rec_type == "response" else None
        ):
            if answer is _DAMAGED:
                warn(f"{path}: the record at byte {start} is damaged and left out")
                yield "", "damaged"
            elif answer is not None:
                yield answer


def _identity(record: Any) -> tuple[str, bool] | None:
    """The requested URL of a `response` record, and whether robots.txt was obeyed."""
    if record.rec_type != "response":
        return None
    headers = record.rec_headers
    url = headers.get_header(_REQUESTED) or headers.get_header("WARC-Target-URI", "")
    return url, headers.get_header(_ROBOTS) != "ignore"


def _response(record: Any, max_bytes: int) -> tuple[str, Page | str]:
    """URL and page of a `response` record, or the reason why it holds none."""
    url = record.rec_headers.get_header("WARC-Target-URI", "")
    requested = record.rec_headers.get_header(_REQUESTED, url)
    try:
        return requested, _page(record, url, requested, max_bytes)
    except PageError as error:
        return requested, error.reason
    except (EOFError, ValueError):
        return requested, "bad_response"


def _page(record: Any, url: str, requested: str, max_bytes: int) -> Page:
    """The page in a record, by the rules of a crawl. Raises PageError, or EOFError or ValueError for no HTTP."""
    if not url.startswith(("http:", "https:")):
        raise PageError("scheme")  # dns:, whois:
    http = _HTTP.parse(record.raw_stream)
    status = int(http.get_statuscode())
    if status not in (200, 203):
        raise PageError(f"http_{status}")
    if record.rec_headers.get_header("WARC-Truncated"):
        raise PageError("truncated")
    content_type = http.get_header("Content-Type", "")
    if content_type.partition(";")[0].strip().lower() not in PAGE_TYPES:
        raise PageError("content_type")
    raw = record.raw_stream.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise PageError("too_large")
    if http.get_header("Transfer-Encoding", "").strip().lower() == "chunked":
        raw = ChunkedDataReader(BytesIO(raw)).read()  # as it is, where it has no chunks
    encoding = http.get_header("Content-Encoding", "")
    try:
        body = decode_body(raw, encoding, max_bytes)
    except PageError as error:
        # Common Crawl stores bodies decoded; until August 2018 (CC-NEWS: May 2019) it left the old headers as they were
        decoded = raw[:64].lstrip(_BLANK).startswith(b"<") or ("gzip" in encoding.lower() and raw[:3] != _MEMBER)
        if error.reason != "bad_encoding" or not decoded:
            raise
        body = raw
    if body.startswith(BINARY):
        raise PageError("content_type")
    return Page(
        url=url,
        status=status,
        reason=http.statusline.partition(" ")[2],
        headers=tuple(http.headers),
        content_type=content_type,
        raw=raw,
        body=body,
        requested=requested,
    )
