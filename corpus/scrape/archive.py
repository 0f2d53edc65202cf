"""The archive of a crawl: a WARC 1.0 file of raw responses, one gzip member per record, only ever appended to.

    archive.warc.gz = warcinfo record, then one `response` record per fetched page

WARC-Target-URI is the URL that answered. X-Requested-URI is the URL requested, if that differs by redirects or
spelling, so that documents keep their URLs. X-Robots-Policy: ignore marks pages fetched with scrape.obey_robots: false.
"""

import os
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import IO, cast

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from common.errors import InputError, TruncatedError
from corpus.scrape.journal import key_of
from corpus.scrape.response import FetchedPage
from corpus.scrape.warc import (
    DAMAGED,
    GZIP_MAGIC,
    REQUESTED_HEADER,
    ROBOTS_HEADER,
    parse_request,
    parse_response,
    read_records,
)

_TORN_INFO = 1024  # bytes; a longer file without a complete record is not ours, but of another kind


class Archive:
    """An open archive. Opening it reads the whole file into `responses`, and cuts off a torn record at its end.

    Raises InputError for a file of another kind.
    """

    def __init__(self, path: Path, obey_robots: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._obey_robots = path, obey_robots
        self.responses: dict[str, tuple[int, bool]] = {}
        """For each URL (its `key_of`), the offset of its last record, and whether robots.txt was asked before."""
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
                    if request is not DAMAGED:
                        if record_end <= valid_end:  # such records cannot be read one by one
                            raise InputError(f"{self.path}: many records in one gzip member; read it with --warc")
                        valid_end = record_end
                        if request is not None:
                            with suppress(ValueError):  # not a URL
                                self.responses[key_of(request[0])] = record_start, request[1]
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

    def obeyed(self, key: str) -> bool:
        """Whether robots.txt was asked before the response of a URL was fetched."""
        return self.responses[key][1]

    def append(self, page: FetchedPage) -> None:
        """Append a response."""
        file = self._file or self._open()
        start = file.tell()
        # The body is stored without chunks, so the header that announces them is dropped.
        headers = [(name, value) for name, value in page.headers if name.lower() != "transfer-encoding"]
        status = StatusAndHeaders(f"{page.status} {page.reason}".strip(), headers, protocol="HTTP/1.1")
        record = self._writer.create_warc_record(
            page.url,
            "response",
            payload=BytesIO(page.raw),
            length=len(page.raw),
            http_headers=status,
            warc_headers_dict={
                **({REQUESTED_HEADER: page.requested} if page.requested != page.url else {}),
                **({} if self._obey_robots else {ROBOTS_HEADER: "ignore"}),
            },
        )
        self._writer.write_record(record)
        file.flush()
        self.responses[key_of(page.requested or page.url)] = start, self._obey_robots

    def read(self, key: str, max_bytes: int) -> FetchedPage | str:
        """The page of a URL in `responses`, or why it has none. Raises InputError if it is damaged."""
        if self._reader is None:
            self._reader = open(self.path, "rb")  # noqa: SIM115 - closed by __exit__
        start, _ = self.responses[key]
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
