"""Where remote files lie: the Hugging Face Hub, S3 buckets, web servers.

A store lists folders and says how a file is requested and verified; `corpus.remote.download` does
the rest for all of them. huggingface_hub and boto3 find endpoints and credentials in their usual
places. A new store is a class here and a branch of `open_store`.
"""

import asyncio
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

import lxml.html
from yarl import URL

from common.errors import InputError, OutageError
from common.settings import CorpusSettings, SourceSettings
from corpus.remote.client import CREDENTIALS, MISSING, NO_HEAD, Client, MissingError, run
from corpus.urls.url import PATH_CHARACTERS

_API_MODULES = ("huggingface_hub", "httpx", "httpx2", "boto3", "botocore", "json")  # json: a page instead of an API
_AT_ONCE = 16  # requests for details of files
_MD5 = re.compile(r'etag:"([0-9a-f]{32})(-\d+)?"')


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a store, or a folder, whose name ends with a slash."""

    name: str
    """Below the root of the store, or of the listing."""
    size: int | None = None
    """In bytes; None if the store does not tell."""
    check: str = ""
    """What tells a change: `sha256:…`, `git:…`, `etag:"…"`, `modified:…`, or nothing."""
    run: str = ""
    """The run of `base` that has read the file; empty if it is to be fetched."""


class Store(ABC):
    """A place with files."""

    root: str
    """The URL of all of it, which ends with a slash."""
    guarded = False
    """Whether private addresses are refused."""

    @abstractmethod
    def entries(self, folder: str) -> Iterable[Entry]:
        """The files and folders in a folder: empty, or a path with a slash at its end."""

    @abstractmethod
    def find(self, path: str) -> Entry | None:
        """The entry of a file, if it exists."""

    def url(self, path: str) -> str:
        """The URL of a path, for `open_store` and for people."""
        return self.root + path

    @abstractmethod
    def request(self, path: str) -> tuple[str, dict[str, str]]:
        """The URL and the headers that fetch a file."""

    def details(self, paths: Sequence[str]) -> Iterable[Entry]:
        """The entries of files; those that do not exist are left out."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(filter(None, pool.map(self.find, paths)))

    def hasher(self, entry: Entry) -> tuple[Any, str] | None:
        """A hash object and the hash that the file must have; None if the store has none."""
        kind, _, value = entry.check.partition(":")
        if kind == "git":
            return hashlib.sha1(b"blob %d\0" % (entry.size or 0), usedforsecurity=False), value
        return (hashlib.sha256(), value) if kind == "sha256" else None


def open_store(source: SourceSettings, url: str, settings: CorpusSettings) -> tuple[Store, str]:
    """The store of a URL of a source, and the URL's path in it. Raises ToolkitError."""
    scheme, _, rest = url.partition("://")
    if scheme == "hf":
        if not (match := re.fullmatch(r"datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/?(.*)", rest)):
            raise InputError(f"{url}: give hf://datasets/OWNER/NAME/PATH or hf://datasets/OWNER/NAME@REVISION/PATH")
        return Hub(match[1], match[2] and unquote(match[2])), match[3]
    site, slash, path = rest.partition("/")
    if not (site and slash):
        raise InputError(f"{url}: names no host or bucket, or no path below it")
    if scheme == "s3":
        return Bucket(site, source.anonymous), path
    return Web(f"{scheme}://{site}/", settings), unquote(path)


class Hub(Store):
    """A dataset repository on the Hugging Face Hub, at one commit."""

    def __init__(self, name: str, revision: str | None) -> None:
        from huggingface_hub import HfApi

        self._api, self._name = HfApi(), name
        if not re.fullmatch("[0-9a-f]{40}", revision or ""):
            with _errors(f"hf://datasets/{name}" + (f"@{revision}" if revision else "")):
                revision = self._api.dataset_info(name, revision=revision).sha
        self._at: Any = {"repo_type": "dataset", "revision": revision}
        self.root = f"hf://datasets/{name}@{quote(str(revision), safe='')}/"

    def entries(self, folder: str) -> Iterator[Entry]:
        """See `Store`."""
        with _errors(self.root + folder):
            yield from map(_of_hub, self._api.list_repo_tree(self._name, folder.rstrip("/") or None, **self._at))

    def find(self, path: str) -> Entry | None:
        """See `Store`."""
        with _errors(self.root + path):
            found = map(_of_hub, self._api.get_paths_info(self._name, [path], **self._at))
            return next((entry for entry in found if entry.name == path), None)

    def request(self, path: str) -> tuple[str, dict[str, str]]:
        """See `Store`."""
        from huggingface_hub import get_token, hf_hub_url

        token = get_token()
        return hf_hub_url(self._name, path, **self._at), {"Authorization": f"Bearer {token}"} if token else {}


def _of_hub(item: Any) -> Entry:
    if not hasattr(item, "blob_id"):
        return Entry(item.path + "/")
    return Entry(item.path, item.size, f"sha256:{item.lfs.sha256}" if item.lfs else f"git:{item.blob_id}")


class Bucket(Store):
    """A bucket on S3, or on a server that speaks its protocol (AWS_ENDPOINT_URL)."""

    def __init__(self, bucket: str, anonymous: bool) -> None:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import ClientError

        self.root, self._bucket = f"s3://{bucket}/", {"Bucket": bucket}
        config = Config(signature_version=UNSIGNED if anonymous else "s3v4", max_pool_connections=_AT_ONCE)
        with _errors(self.root):
            self._client = boto3.client("s3", config=config)
            if ".amazonaws." in self._client.meta.endpoint_url:  # signed URLs are for the bucket's region
                try:
                    headers = self._client.head_bucket(**self._bucket)["ResponseMetadata"]["HTTPHeaders"]
                except ClientError as error:  # names it, too
                    headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
                self._client = boto3.client("s3", config=config, region_name=headers.get("x-amz-bucket-region"))

    def entries(self, folder: str) -> Iterator[Entry]:
        """See `Store`."""
        pages = self._client.get_paginator("list_objects_v2")
        with _errors(self.root + folder):
            for page in pages.paginate(**self._bucket, Prefix=folder, Delimiter="/"):
                yield from (Entry(each["Prefix"]) for each in page.get("CommonPrefixes", ()))
                files = (each for each in page.get("Contents", ()) if not each["Key"].endswith("/"))  # marks of folders
                yield from (Entry(each["Key"], each["Size"], f"etag:{each['ETag']}") for each in files)

    def find(self, path: str) -> Entry | None:
        """See `Store`."""
        with suppress(MissingError), _errors(self.root + path):
            head = self._head(path)
            return Entry(path, head["ContentLength"], f"etag:{head['ETag']}")
        return None

    def request(self, path: str) -> tuple[str, dict[str, str]]:
        """See `Store`."""
        return self._client.generate_presigned_url("get_object", {**self._bucket, "Key": path}), {}  # for one hour

    def hasher(self, entry: Entry) -> tuple[Any, str] | None:
        """See `Store`. An ETag is the MD5 of the object, or of the MD5s of its uploaded parts.

        Not if a key of the user encrypts it.
        https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
        """
        if not (match := _MD5.fullmatch(entry.check)):
            return None
        with _errors(self.root + entry.name):
            first = self._head(entry.name, PartNumber=1)
            count, part = first.get("PartsCount", 1), first["ContentLength"]
            last = (entry.size or 0) - part * (count - 1)
            sizes = [part] * (count - 1) + [last]
            if match[2] and last != self._head_size(entry.name, count):
                sizes = [self._head_size(entry.name, number) for number in range(1, count + 1)]
        if "kms" in first.get("ServerSideEncryption", "") or "SSECustomerAlgorithm" in first:
            return None
        return (_PartsHash(sizes) if match[2] else hashlib.md5(usedforsecurity=False)), match[1]

    def _head(self, path: str, **more: int) -> Any:
        return self._client.head_object(**self._bucket, Key=path, **more)

    def _head_size(self, path: str, part: int) -> int:
        return int(self._head(path, PartNumber=part)["ContentLength"])


class _PartsHash:
    """The MD5 of the MD5s of the parts of an upload."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._parts = iter(sizes), b""
        self._begin()

    def _begin(self) -> None:
        self._part, self._left = hashlib.md5(usedforsecurity=False), next(self._sizes, 0)

    def update(self, data: bytes) -> None:
        """Hash more bytes."""
        while data and self._left:
            self._part.update(data[: self._left])
            data, self._left = data[self._left :], max(0, self._left - len(data))
            if not self._left:
                self._parts += self._part.digest()
                self._begin()

    def hexdigest(self) -> str:
        """The hash of all parts."""
        return hashlib.md5(self._parts, usedforsecurity=False).hexdigest()


class Web(Store):
    """A web server: its directory pages list files, and HEAD requests tell their sizes."""

    guarded = True

    def __init__(self, root: str, settings: CorpusSettings) -> None:
        self.root, self._settings = root, settings

    def entries(self, folder: str) -> Iterator[Entry]:
        """The links of a directory page that lead into its folder."""
        page, base = read_file(self, folder, self._settings), URL(self.url(folder), encoded=True)
        names, utf8 = dict[str, None](), lxml.html.HTMLParser(encoding="utf-8")
        for link in lxml.html.document_fromstring(page, parser=utf8).xpath("//a/@href") if page.strip() else ():
            with suppress(ValueError):  # no URL
                target = base.join(URL(str(link).strip()))
                below = target.raw_path.removeprefix(base.raw_path)
                is_inside = target.origin() == base.origin() and not target.raw_query_string
                if is_inside and below not in ("", target.raw_path) and "/" not in below[:-1]:
                    names[unquote(below)] = None
        yield from (Entry(folder + name) for name in names)

    def find(self, path: str) -> Entry | None:
        """See `Store`."""
        return next(iter(self.details([path])), None)

    def details(self, paths: Sequence[str]) -> Iterable[Entry]:
        """See `Store`; a request per file."""
        return run(self._details(paths))

    async def _details(self, paths: Sequence[str]) -> list[Entry]:
        found, waiting = list[Entry](), iter(paths)
        async with Client(self._settings, self.guarded) as client:

            async def ask() -> None:
                for path in waiting:
                    with suppress(MissingError):
                        found.append(await client.retry(partial(self._head, client, path), self.url(path)))

            await asyncio.gather(*(ask() for _ in range(_AT_ONCE)))
        return found

    async def _head(self, client: Client, path: str, method: str = "HEAD") -> Entry:
        async with client.request(method, *self.request(path), self.url(path)) as response:
            if response.url.path.endswith("/"):  # a redirect to a directory page
                raise MissingError(f"{self.url(path)}: is a folder")
            if response.status not in NO_HEAD:
                return Entry(path, response.content_length or None, validator(response.headers))  # 0: not told
        return await self._head(client, path, "GET")  # the headers of that; the body is not read

    def url(self, path: str) -> str:
        """See `Store`."""
        return self.root + quote(path, safe=PATH_CHARACTERS)

    def request(self, path: str) -> tuple[str, dict[str, str]]:
        """See `Store`."""
        return self.url(path), {}


def validator(headers: Mapping[str, str]) -> str:
    """What tells a change of a file of a web server, as `Entry.check`."""
    etag, modified = headers.get("ETag"), headers.get("Last-Modified")
    return f"etag:{etag}" if etag else f"modified:{modified}" if modified else ""


def read_file(store: Store, path: str, settings: CorpusSettings) -> bytes:
    """The content of a file that is not large: a page or a list. Raises ToolkitError."""
    name = store.url(path)

    async def read() -> bytes:
        async with Client(settings, store.guarded) as client:
            return await client.retry(partial(client.read, *store.request(path), name), name)

    return run(read())


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turns errors of huggingface_hub and boto3 into one line each; MissingError for a 404."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _API_MODULES:
            raise
        response, kind = getattr(error, "response", None), type(error).__name__
        metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        status = int(metadata.get("HTTPStatusCode", 0) or getattr(response, "status_code", 0))
        said = f"{kind}, HTTP {status}" if status else f"no answer ({kind})"
        if status == 404:
            raise MissingError(f"{name}: {MISSING}") from None
        if status in (401, 403) or "Credential" in kind or "Profile" in kind:
            raise InputError(f"{name}: access refused ({kind}); {CREDENTIALS}") from None
        if status in (408, 429) or status >= 500 or re.search("Connect|Timeout|HTTPClient|Read|Write|Protocol", kind):
            raise OutageError(f"{name}: {said}; rerun to continue") from None
        raise InputError(f"{name}: {said}") from None
