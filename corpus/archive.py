"""Raw responses as WARC 1.0, one gzip member a record, under the pages' logical URLs.

archive.warc.gz = warcinfo record, then one `response` record a fetched page
"""

import os
from io import BytesIO
from pathlib import Path
from types import TracebackType

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from common.errors import InputError
from corpus.fetch import Page


class Archive:
    """An open WARC file. `end` is its length after the last record that counts; a torn rest is cut off."""

    def __init__(self, path: Path, end: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115 - closed by __exit__
        if self._file.tell() < end:
            self._file.close()
            raise InputError(f"{path}: shorter than the journal of this scrape says; delete the journal to start over")
        self._file.truncate(end)
        self._writer = WARCWriter(self._file, gzip=True)
        if end == 0:
            about = {"software": "urls-to-gpt2", "format": "WARC File Format 1.0"}
            self._writer.write_record(self._writer.create_warcinfo_record(path.name, about))
            self._file.flush()

    def __enter__(self) -> "Archive":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sync()
        self._file.close()

    def append(self, page: Page) -> int:
        """Write one response; the file's new length."""
        # The body is stored without its chunks, so the header that announces them goes, too.
        headers = [(name, value) for name, value in page.headers if name.lower() != "transfer-encoding"]
        status = StatusAndHeaders(f"{page.status} {page.reason}".strip(), headers, protocol="HTTP/1.1")
        record = self._writer.create_warc_record(
            page.url, "response", payload=BytesIO(page.raw), length=len(page.raw), http_headers=status
        )
        self._writer.write_record(record)
        self._file.flush()
        return self._file.tell()

    def sync(self) -> None:
        """Wait until the disk has every record; safe to call from another thread."""
        os.fsync(self._file.fileno())
