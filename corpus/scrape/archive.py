"""Read the pages of WARC files, and append to the archive of a crawl.

for url, page in read_pages(Path("CC-MAIN-00001.warc.gz"), max_bytes=10_000_000): ...
"""

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from warcio.statusandheaders import StatusAndHeaders, StatusAndHeadersParser
from warcio.warcwriter import WARCWriter

from common.console import warn
from common.errors import InputError, PageError
from common.files import LONGEST_LINE, fsync, is_binary, is_torn, output_files
from corpus.index.layout import RECORDS
from corpus.scrape.journal import key_of
from corpus.scrape.pages import Outcome
from corpus.scrape.response import PAGE_TYPES, FetchedPage, decode_body, media_type, unframed
from corpus.scrape.warc import DAMAGED, GZIP_MAGIC, complete_records, read_records
from corpus.urls.url import document_id

REQUESTED_HEADER = "X-Requested-URI"
"""The URL requested, if it differs from WARC-Target-URI; only our archives have it."""
_SOFTWARE = "urls-to-gpt2"
_FIRST = 1024  # bytes; the first record is shorter, and is on the disk before the second is written
_BLANK = b"\xef\xbb\xbf \t\r\n"  # before the first tag: white space and UTF-8's byte-order mark
_HTTP = StatusAndHeadersParser([], verify=False)


def read_pages(path: Path, max_bytes: int, texts: bool = False) -> Iterator[tuple[str, FetchedPage | Outcome | str]]:
    """Yield the URL of every response of a WARC file, and its page or why it has none.

    A damaged record of a compressed file (`damaged`) costs only itself. With `texts`, documents of
    WET files (`conversion` records) are yielded, too. Raises InputError for a file that is not
    WARC, is truncated, or is damaged in another way.
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
                url, page = response
                if isinstance(page, FetchedPage):
                    page = replace(page, origin=f"{path}:{start}")
                elif not isinstance(page, str):
                    page["record"]["origin"] = f"{path}:{start}"
                yield url, page


def parse_text(record: Any) -> tuple[str, Outcome | str]:
    """The URL of a `conversion` record, and its document or why it has none."""
    url = record.rec_headers.get_header("WARC-Target-URI", "")
    text = record.raw_stream.read(LONGEST_LINE + 1)
    if len(text) > LONGEST_LINE:
        return url, "too_large"
    headers = {"date": "WARC-Date", "language": "WARC-Identified-Content-Language"}
    meta = {key: value for key, name in headers.items() if (value := record.rec_headers.get_header(name))}
    try:
        document = {"text": text.decode(), "url": url, "meta": meta}
        return url, {"record": document, "bytes": len(text), "date": meta.get("date", "")[:10]}
    except UnicodeDecodeError:
        return url, "bad_encoding"


def parse_request(record: Any) -> str | None:
    """The requested URL of a `response` record; None for other records."""
    headers = record.rec_headers
    url = headers.get_header(REQUESTED_HEADER) or headers.get_header("WARC-Target-URI", "")
    return str(url) if record.rec_type == "response" else None


def parse_response(record: Any, max_bytes: int) -> tuple[str, FetchedPage | str]:
    """The requested URL of a `response` record, and its page or why it has none."""
    requested = parse_request(record) or ""
    try:
        return requested, _page(record, requested, max_bytes)
    except PageError as error:
        return requested, error.reason
    except (EOFError, ValueError):
        return requested, "bad_response"


def _page(record: Any, requested: str, max_bytes: int) -> FetchedPage:
    """The page of a record, by the rules of a crawl.

    Raises PageError; EOFError or ValueError if it is not HTTP.
    """
    url = record.rec_headers.get_header("WARC-Target-URI", "")
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
        # Common Crawl stores decoded bodies, until 2018 (CC-NEWS: 2019) with the original headers
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


def write_records(archive: Path, responses: Mapping[str, int]) -> None:
    """Write ARCHIVE.records, by which `corpus.index.documents` finds records: see docs/formats.md.

    `responses`: for each URL, the offset of its last record.
    """
    offsets = sorted((int(document_id(url), 16), start) for url, start in responses.items())
    with output_files([archive.with_name(archive.name + RECORDS)]) as (output,):
        output.append(np.array(offsets, "<u8").reshape(-1, 2).T.tobytes())


def _is_torn_first(file: IO[bytes]) -> bool:
    """Whether a file without a complete record is a torn first record, perhaps with zeros."""
    first = file.read(_FIRST)
    if any(block.strip(b"\0") for block in iter(partial(file.read, 1 << 20), b"")):
        return False
    member = zlib.decompressobj(wbits=31)
    with suppress(zlib.error):
        member.decompress(first)
    return is_torn(first, GZIP_MAGIC[:2]) and not member.eof  # a complete member is another file


class Archive:
    """An open archive: a WARC 1.0 file of raw responses, one gzip member per record, append-only.

        archive.warc.gz = warcinfo record, then one `response` record per fetched page

    WARC-Target-URI is the URL that answered. X-Requested-URI is the URL requested if it differs by
    redirects or spelling, so that documents keep their URLs. Opening reads the whole file, and cuts
    off what follows the last complete record. Raises InputError for a file of another kind.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.responses: dict[str, int] = {}
        """For each URL (its `key_of`), the offset of its last record."""
        self.torn_bytes = 0
        """How many bytes opening has cut off."""
        if path.exists() and (size := path.stat().st_size):
            end = self._scan()
            if end < size:
                os.truncate(path, end)
                self.torn_bytes = size - end
        self._file: IO[bytes] | None = None  # opened by the first write

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        if self._file is not None:
            self._file.close()

    def _scan(self) -> int:
        """Fill `responses`; returns the end of the last complete record. Raises InputError."""
        end, ours = 0, False

        def parse(record: Any) -> tuple[str | None, bool]:
            is_info = record.rec_type == "warcinfo"
            return parse_request(record), is_info and _SOFTWARE.encode() in record.raw_stream.read(_FIRST)

        with self.path.open("rb") as file:
            for start, end, (request, is_ours) in complete_records(file, self.path, parse):  # noqa: B007
                ours = ours or is_ours
                if request is not None:
                    with suppress(ValueError):  # not a URL
                        self.responses[key_of(request)] = start
            file.seek(0)
            if not end and not _is_torn_first(file):
                raise InputError(f"{self.path}: not a WARC file with a gzip member per record; name another file")
        if end and end < self.path.stat().st_size and not ours:
            raise InputError(
                f"{self.path}: damaged after byte {end}, and another tool's archive, which is not repaired; cut it off "
                "there, or name another file"
            )
        return end

    def _open(self) -> IO[bytes]:
        """Open the file to append to; a new file begins with a warcinfo record."""
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by __exit__
        self._writer = WARCWriter(self._file, gzip=True)
        if self._file.tell() == 0:
            about = {"software": _SOFTWARE, "format": "WARC File Format 1.0"}
            self._writer.write_record(self._writer.create_warcinfo_record(self.path.name, about))
            self._file.flush()
            fsync(self.path)
            fsync(self.path.parent)
        return self._file

    def append(self, page: FetchedPage) -> None:
        """Append a response."""
        file = self._file or self._open()
        start = file.tell()
        # the body is stored without chunks, so the header that announces them is dropped
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
        """The page of a URL in `responses`, or why it has none. Raises InputError if damaged."""
        start = self.responses[key]
        with self.path.open("rb") as file:
            file.seek(start)
            records = read_records(file, self.path, lambda record: parse_response(record, max_bytes))
            response: Any = next((record for _, _, record in records), DAMAGED)
        if response is DAMAGED:
            raise InputError(f"{self.path}: the record at byte {start} ({key}) has changed; run it again")
        return cast(FetchedPage | str, response[1])

    def sync(self) -> None:
        """Wait until all records are on disk; may be called from another thread."""
        if self._file is not None:
            os.fsync(self._file.fileno())
