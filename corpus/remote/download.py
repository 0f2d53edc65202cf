"""Fetches the files of a listing, several at a time: resumed, verified, all or nothing.

A file is written to NAME.tmp and renamed when its size and its checksum are right. A fetch that was
killed resumes it where it ends; without a checksum, which would tell what a power cut has left,
where it was on the disk for sure. Without ETag or date to tell a change, it starts again.
"""

import asyncio
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from common.errors import InputError, OutageError, ToolkitError
from common.files import fsync
from common.progress import Meter
from common.settings import CorpusSettings
from corpus.remote.client import Client, TemporaryError, run
from corpus.remote.listing import Listing
from corpus.remote.stores import Entry, Store, validator

_BLOCK = 1 << 25  # bytes between two flushes to the disk of a file without a checksum
_PIECE = 1 << 20  # bytes that are read at a time
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class Downloader:
    """Fetches files of one listing."""

    def __init__(self, store: Store, path: str, listing: Listing, settings: CorpusSettings, meter: Meter) -> None:
        self._store, self._path, self._listing = store, path, listing
        self._settings, self._meter = settings, meter
        self._free_at = 0.0
        self._begun = set[Path]()  # by this process, which has seen no power cut

    def fetch(self, files: Sequence[Entry], folder: Path) -> None:
        """Fetch files to their names below `folder`.

        When all other files are there, raises the first error that a person must cure, or else the
        first OutageError; that at once if one file after the other fails.
        """
        run(self._fetch(files, folder))

    async def _fetch(self, files: Sequence[Entry], folder: Path) -> None:
        waiting, most = iter(files), self._settings.fetch.concurrency
        errors, outages = list[ToolkitError](), list[OutageError]()

        async def worker() -> None:
            for file in waiting:
                try:
                    await self._file(file, folder / file.name)
                    outages.clear()
                except OutageError as error:
                    outages.append(error)
                    errors.append(error)
                    if len(outages) > most:
                        raise
                except InputError as error:
                    errors.insert(0, error)

        async with Client(self._settings, self._store.guarded) as self._client:
            workers = [asyncio.create_task(worker()) for _ in range(most)]
            try:
                await asyncio.gather(*workers)
            finally:
                for each in workers:
                    each.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        if errors:
            more = f" (and {len(errors) - 1:,} more files)" if errors[1:] else ""
            raise type(errors[0])(f"{errors[0]}{more}")

    async def _file(self, file: Entry, target: Path) -> None:
        part, name = target.with_name(f"{target.name}.tmp"), self._listing.root + file.name
        if not target.exists():  # otherwise a killed fetch has left it, whose text is missing
            target.parent.mkdir(parents=True, exist_ok=True)
            await self._client.retry(partial(self._attempt, file, name, part), name, lambda: _size(part))
            await asyncio.to_thread(fsync, part)
            part.replace(target)
            fsync(target.parent)
        self._meter.advance()

    async def _attempt(self, file: Entry, name: str, part: Path) -> None:
        """Fetch the rest of a file. Raises TemporaryError, and InputError if it has changed."""
        stored = Entry(self._path + file.name, file.size, file.check)
        wanted = await asyncio.to_thread(self._store.hasher, stored)
        kept = _size(part) if file.check else 0
        if not wanted and part not in self._begun:  # a power cut may have left zeros at its end
            kept = max(0, kept - 2 * _BLOCK)
        if not kept or kept != file.size:
            await self._rest(stored, name, part, kept, flush=not wanted)
        size = _size(part)
        if file.size is not None and size != file.size:
            if size > file.size:
                part.unlink()
            raise TemporaryError(f"{size:,} bytes came, not {file.size:,}")
        if wanted and await asyncio.to_thread(_hash_of, part, wanted[0]) != wanted[1]:
            part.unlink()
            raise TemporaryError("the checksum is not that of the listing")

    async def _rest(self, stored: Entry, name: str, part: Path, kept: int, *, flush: bool) -> None:
        """Request a file from a byte on, and write what comes."""
        etag = stored.check.removeprefix("etag:")
        headers = {"Range": f"bytes={kept}-"} if kept else {}
        headers |= {"If-Match": etag} if etag.startswith('"') else {}
        url, own = self._store.request(stored.name)
        async with self._client.request("GET", url, headers | own, name) as response:
            start = self._start(response, stored, name, kept, part)
            with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                flushed = file.seek(file.truncate(start))
                self._begun.add(part)
                async for piece in response.content.iter_chunked(_PIECE):
                    file.write(piece)
                    self._meter.advance(0, len(piece))
                    if flush and file.tell() - flushed >= _BLOCK:
                        file.flush()
                        await asyncio.to_thread(os.fsync, file.fileno())
                        flushed = file.tell()
                    await self._throttle(len(piece))

    def _start(self, response: aiohttp.ClientResponse, stored: Entry, name: str, kept: int, part: Path) -> int:
        """The byte at which a response begins. Raises InputError if the file has changed."""
        start, total = 0, response.content_length
        if response.status == 206:
            match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            start, total = (int(match[1]), None if match[2] == "*" else int(match[2])) if match else (-1, None)
        if response.status == 416 or (response.status == 206 and start != kept):
            part.unlink(missing_ok=True)
            raise TemporaryError("the server gave another range than the rest of the file")
        now, change = validator(response.headers), ""
        if response.status == 412:
            change = "another ETag"
        elif total is not None and stored.size is not None and total != stored.size:
            change = f"{total:,} bytes, not {stored.size:,}"
        elif stored.check.startswith(("etag", "modified")) and now not in ("", stored.check):
            change = f"{now}, not {stored.check}"
        if change:
            cure = "python -m corpus.fetch --renew lists its source again"
            raise InputError(f"{name}: has changed since it was listed on {self._listing.listed}: {change}; {cure}")
        return start

    async def _throttle(self, size: int) -> None:
        """Wait until `size` more bytes fit the cap on the bandwidth."""
        if cap := self._settings.fetch.max_mb_per_s * 1e6:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now) + size / cap
            await asyncio.sleep(self._free_at - now)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _hash_of(path: Path, hash_: Any) -> str:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            hash_.update(piece)
    return str(hash_.hexdigest())
