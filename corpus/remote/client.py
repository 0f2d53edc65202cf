"""HTTP requests for files of any store: redirects, credentials and private addresses.

A request to a plain web server, which is `guarded`, is held to the rules of scraping: no private
address, also after a redirect, and a User-Agent with a contact; passwords are from ~/.netrc. Stores
with an API are reached where their environment says. Proxies count for all.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from common.errors import ConfigError, InputError, OutageError, PageError
from common.settings import CorpusSettings
from corpus.scrape.network import AddressOverrides, exit_on_signals, open_session
from corpus.scrape.response import REDIRECTS, retry_after, to_page_error
from corpus.urls.hosts import is_private_host
from corpus.urls.url import DEFAULT_PORTS, parse_url

_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity"}  # the bytes of the file
_LONGEST_PAUSE, _LONGEST_WAIT = 300.0, 3600.0  # seconds before a retry: ours, and by Retry-After
_PAGE = 1 << 26  # bytes of a directory page or a list of paths
NO_HEAD = (403, 405, 501)
"""The status codes of servers that answer GET alone."""
CREDENTIALS = "set HF_TOKEN, AWS_PROFILE or ~/.netrc; `anonymous: true` reads a public bucket"
MISSING = f"not there (HTTP 404), or private: {CREDENTIALS}; --renew lists the source again"
Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run requests to their end; SIGTERM and SIGHUP end them without a traceback."""

    async def ending() -> Result:
        with exit_on_signals():
            return await work

    return asyncio.run(ending())


class MissingError(InputError):
    """A file that the store does not have."""


class TemporaryError(Exception):
    """A request that may succeed later, after `wait` seconds or more."""

    def __init__(self, problem: str, wait: float = 0.0) -> None:
        super().__init__(problem)
        self.wait = wait


class Client:
    """A session for the requests to one store."""

    def __init__(self, settings: CorpusSettings, guarded: bool) -> None:
        self._scrape, self._fetch, self._guarded = settings.scrape, settings.fetch, guarded
        self._allow_private = settings.blacklist.allow_private_hosts
        self._addresses = AddressOverrides(settings.scrape.resolve)

    async def __aenter__(self) -> "Client":
        by_proxy = bool({"http", "https"} & getproxies().keys())  # it resolves the names, and may be private itself
        unguarded = self._allow_private or by_proxy or not self._guarded
        self._session = open_session(self._scrape, unguarded, trust_env=self._guarded)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def request(
        self, method: str, url: str, headers: dict[str, str], name: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response of `url`, redirects followed, which is `name` in messages.

        Raises TemporaryError, also while the response is read, and InputError for what a person
        must cure. URLs appear in no message: they may be signed.
        """
        headers = _HEADERS | headers
        try:
            for _ in range(self._scrape.max_redirects + 1):
                target, own = self._target(url, name)
                async with self._session.request(
                    method, target, headers=headers | own, allow_redirects=False, proxy=self._proxy(target)
                ) as response:
                    if response.status not in REDIRECTS or "Location" not in response.headers:
                        _check(response, name)
                        yield response
                        return
                    here = URL(url, encoded=True)
                    there = here.join(URL(response.headers["Location"], encoded=True))
                    if (there.scheme, there.authority) != (here.scheme, here.authority):
                        headers = {key: headers[key] for key in headers.keys() - {"Authorization"}}
                    url = str(there)
            raise InputError(f"{name}: more than {self._scrape.max_redirects} redirects (scrape.max_redirects)")
        except (aiohttp.ClientError, TimeoutError, PageError, ValueError) as error:
            reason = (error if isinstance(error, PageError) else to_page_error(error, name)).reason
            if reason == "private_host":
                raise InputError(_private(name)) from None
            if reason in ("tls", "bad_url"):
                raise InputError(f"{name}: {error}") from None
            raise TemporaryError(reason) from None

    async def read(self, url: str, headers: dict[str, str], name: str) -> bytes:
        """The content of a file that is not large."""
        body = bytearray()
        async with self.request("GET", url, headers, name) as response:
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > _PAGE:
                    raise InputError(f"{name}: more than {_PAGE:,} bytes, too large for a list of files")
        return bytes(body)

    async def retry(
        self, action: Callable[[], Awaitable[Result]], name: str, reached: Callable[[], int] = int
    ) -> Result:
        """`action()`, again after a TemporaryError. Progress, by `reached`, resets the count.

        Raises OutageError after `fetch.retries` retries without progress.
        """
        failures, most = 0, reached()
        while True:
            try:
                return await action()
            except TemporaryError as error:
                failures = 1 if reached() > most else failures + 1
                most = max(most, reached())
                if failures > self._fetch.retries:
                    problem = f"{name}: {error}, after {failures} attempts"
                    raise OutageError(f"{problem}; what was fetched is kept, rerun to continue") from None
                pause = min(_LONGEST_PAUSE, self._fetch.retry_delay * 2 ** (failures - 1))
                wait = max(pause, min(_LONGEST_WAIT, error.wait))
            await asyncio.sleep(wait)

    def _proxy(self, target: URL) -> str | None:
        """The proxy of a store with an API; with `trust_env`, ~/.netrc would count, too."""
        by_proxy = not self._guarded and not proxy_bypass(target.host or "")
        return getproxies().get(target.scheme) if by_proxy else None

    def _target(self, url: str, name: str) -> tuple[URL, dict[str, str]]:
        """Where to send the request for a URL, and headers for that. Raises InputError."""
        if not self._guarded:
            return URL(url, encoded=True), {}
        try:
            logical = parse_url(url)
        except ValueError as error:
            raise InputError(f"{name}: leads to a URL that cannot be requested ({error})") from None
        if logical.scheme not in DEFAULT_PORTS:
            raise InputError(f"{name}: leads to {logical.scheme}://, not http:// or https://")
        if self._addresses.get(logical.host) is None:
            if not self._scrape.contact:
                raise ConfigError(f"scrape.contact is empty: set a mail address or page to fetch {name}")
            if is_private_host(logical.host) and not self._allow_private:
                raise InputError(_private(name))
        return self._addresses.target(logical)


def _private(name: str) -> str:
    return f"{name}: leads to a private address; blacklist.allow_private_hosts: true allows that"


def _check(response: Any, name: str) -> None:
    """Raise an error for a response that is not (a part of) the file."""
    status = response.status
    if status in (200, 203, 206, 412, 416) or (response.method == "HEAD" and status in NO_HEAD):
        return
    if status in (404, 410):
        raise MissingError(f"{name}: {MISSING}")
    if status in (401, 403):
        raise InputError(f"{name}: access refused (HTTP {status}); {CREDENTIALS}")
    if status in (408, 429) or status >= 500:
        raise TemporaryError(f"HTTP {status}", retry_after(response))
    raise InputError(f"{name}: HTTP {status}")
