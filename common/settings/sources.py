"""The configuration sections of where text comes from: URL lists, the web and existing files."""

import codecs
import re
from glob import escape
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from common.files import find_inputs, short_hash
from common.settings.section import Name, PositiveFloat, PositiveInt, Section

_ROBOT = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"  # a name in robots.txt
WARC_NAME = re.compile(r"\.(warc|wet)(\.|$)")
"""In the names of WARC files, WET files included."""


class BlacklistSettings(Section):
    """URL rules (`python -m corpus.blacklist`)."""

    min_length: PositiveInt = 9
    """Minimum length of a URL, in characters; OpenWebText's recipe drops those of 8 and fewer."""
    allow_private_hosts: bool = False
    """Keep URLs of loopback, private and link-local addresses, *.local and *.internal."""
    extra_domains: list[str] = []
    """More domains to drop: a host with its subdomains (`blog.example.com`), or a name under any
    suffix (`example`)."""
    domain_lists: list[Path] = []
    """Files with more domains to drop, also hosts files and Adblock lists (docs/scrape.md)."""
    extra_suffixes: list[str] = []
    """Host name suffixes to drop, also public ones: `gov.au` drops itself and all below it."""
    extra_patterns: list[str] = []
    """Python regular expressions; URLs with a match anywhere are dropped. `(?i)` ignores case."""
    extra_extensions: list[Annotated[str, Field(pattern=r"^\.[^./]+$")]] = []
    """File extensions to drop in addition to the built-in list, with their dot."""
    min_score: int = 3
    """Pushshift dumps: skip submissions with a lower score (OpenWebText's rule)."""
    over_18: bool = False
    """Pushshift dumps: keep submissions marked over_18."""
    self_posts: bool = False
    """Pushshift dumps: keep self posts (is_self), which link to themselves."""

    @field_validator("extra_patterns")
    @classmethod
    def _patterns_compile(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        return patterns


class ScrapeSettings(Section):
    """Fetching and extraction (`python -m corpus.scrape`)."""

    user_agent: str = "urls-to-gpt2/0.1"
    """User-Agent header, followed by the contact in parentheses."""
    robot_name: Annotated[str, Field(pattern=rf"^({_ROBOT})?$")] = ""
    """Name of this robot in robots.txt. Empty: the start of user_agent, `MyBot` in `MyBot/1.0`."""
    contact: Name = ""
    """Mail address or web page for site owners; required to scrape public hosts."""
    resolve: dict[str, str] = {}
    """Addresses to connect to with plain HTTP instead of asking DNS: `host: ip:port`, or `"*":
    ip:port` for every host. Private addresses are allowed for these hosts only. For tests, mirrors
    and the demo."""
    concurrency: PositiveInt = 256
    """Maximum number of concurrent requests, over all hosts."""
    host_delay: Annotated[float, Field(ge=0)] = 1.0
    """Seconds between two requests to the same host; a longer Crawl-delay in robots.txt wins."""
    obey_robots: bool = True
    """Fetch and obey robots.txt."""
    opt_outs: Literal["ignore", "obey"] = "ignore"
    """`obey` drops pages that opt out by X-Robots-Tag, meta robots or the TDM Reservation Protocol,
    which takes one more request per host; `ignore` reads none of these."""
    opt_out_directives: list[Annotated[str, Field(pattern=r"^[a-z][a-z_-]*$")]] = ["noai", "noimageai"]
    """Robots directives that are opt-outs. `noindex`, which is for search engines, can be added."""
    connect_timeout: PositiveFloat = 10.0
    """Maximum seconds to connect."""
    read_timeout: PositiveFloat = 15.0
    """Maximum seconds without data from a server."""
    page_timeout: PositiveFloat = 60.0
    """Maximum seconds for one attempt at a page."""
    max_bytes: PositiveInt = 10 * 1024 * 1024
    """Maximum size of a decoded body, in bytes; larger pages are dropped."""
    max_redirects: Annotated[int, Field(ge=0)] = 5
    """Maximum number of redirects per page; every target must pass the URL rules."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Retries per page after 429, 5xx and connection errors."""
    retry_delay: PositiveFloat = 1.0
    """Seconds before the first retry; doubles for each further one. A longer Retry-After wins."""
    host_failures: PositiveInt = 10
    """Consecutive pages that fail by their host's fault before its other URLs are given up."""
    extractors: Annotated[list[Literal["trafilatura", "newspaper3k", "resiliparse"]], Field(min_length=1)] = [
        "trafilatura"
    ]
    """HTML extractors, in order; the next one runs if one finds no text. `[newspaper3k]` is
    OpenWebText's recipe, `[resiliparse]` the fast way."""
    extract_timeout: PositiveFloat = 10.0
    """Maximum seconds of CPU time to extract one page; a page that needs more is dropped."""
    extract_memory_mb: Annotated[int, Field(ge=100)] = 1000
    """Memory to extract a page, in MiB, beyond the libraries' 100; larger pages are dropped."""
    archive: bool = False
    """Keep raw responses as WARC files beside the pages."""

    @property
    def robot_token(self) -> str:
        """The robot's name in robots.txt (RFC 9309, section 2.2.1)."""
        return self.robot_name or re.split(r"[\s/]", self.user_agent, maxsplit=1)[0]

    @model_validator(mode="after")
    def _robot_is_named(self) -> Self:
        name = self.robot_token
        if self.obey_robots and (not re.fullmatch(_ROBOT, name) or name == "Mozilla"):
            raise ValueError(f"user_agent {self.user_agent!r} names no robot: use `MyBot/1.0`, or set robot_name")
        if name.lower() not in self.user_agent.lower():  # RFC 9309: site owners find it in their logs
            raise ValueError(f"robot_name {name!r} must be a part of user_agent {self.user_agent!r}")
        return self


class FetchSettings(Section):
    """Fetching of sources that are URLs (`python -m corpus.fetch`)."""

    concurrency: PositiveInt = 8
    """Files that are fetched at the same time."""
    max_mb_per_s: Annotated[float, Field(ge=0)] = 0.0
    """Cap on the bandwidth of all files together, in 10^6 bytes per second. 0: none."""
    retries: Annotated[int, Field(ge=0)] = 10
    """Retries per file in a row without any progress: after 429, 5xx and connection errors. 10 take
    14 minutes."""
    retry_delay: PositiveFloat = 1.0
    """Seconds before the first retry; doubles for each further one, up to 300. A longer Retry-After
    wins, up to an hour."""


class SourceSettings(Section):
    """A source of existing text (`python -m corpus.ingest`)."""

    path: str
    """File, folder or glob, or a URL of these, hf://, s3:// or https://, which `fetch` fetches. A
    dataset folder of Parquet or Arrow files stands for its train split if it has one, and one of
    Common Crawl's lists of paths for the files that it lists, which must be there."""
    glob: list[str] = []
    """Patterns below the folder `path`, such as `**/*.md`: only files that match one are read."""
    anonymous: bool = False
    """Read s3:// without credentials, as public buckets allow."""
    keep: bool = True
    """Keep the fetched files of a URL. `false` replaces each by its text, and removes that when
    `ingest` has read it."""
    format: Literal["auto", "jsonl", "text", "wikiextractor", "csv", "parquet", "arrow", "warc", "documents"] = "auto"
    """Format of the files. auto: by content and name of each file; an error where they differ.
    documents: shards that a step of this toolkit wrote."""
    encoding: str = "utf-8"
    """Encoding of text, CSV and JSON lines, such as cp1252. A mark of UTF-16 is recognised."""
    text_key: str = "text"
    """Key of the JSON objects, or name of the column, that holds the text."""
    skip_keys: list[str] = []
    """Keys of the JSON objects, or columns, to leave out; the others are kept under `meta`."""
    name: str = ""
    """Written as `meta.source` into documents that have none; empty writes nothing."""

    @field_validator("encoding")
    @classmethod
    def _encoding_is_known(cls, encoding: str) -> str:
        try:
            "".encode(encoding)
        except LookupError:
            raise ValueError(f"{encoding!r} is not an encoding that Python knows, such as latin-1 or utf-16") from None
        return codecs.lookup(encoding).name.removesuffix("-sig")  # a mark is skipped anyway

    @field_validator("path")
    @classmethod
    def _url_is_plain(cls, path: str) -> str:
        scheme, mark, rest = path.partition("://")
        site = rest.partition("/")[0].rpartition("@")
        shown = f"{scheme}://{site[2]}"  # without what may be a secret
        if mark and scheme not in ("hf", "s3", "http", "https"):
            raise ValueError(f"{shown}: cannot be fetched; give hf://, s3://, https://, or a path")
        if mark and (site[1] or (scheme.startswith("http") and re.search("[?#]", rest))):
            cure = "put them where the server's library looks: ~/.netrc, AWS_PROFILE, HF_TOKEN (docs/remote.md)"
            raise ValueError(f"{shown}: a URL with a user, password or query may hold secrets; {cure}")
        return path

    @property
    def is_remote(self) -> bool:
        """Whether `path` is a URL, whose files `fetch` fetches."""
        return "://" in self.path

    @property
    def key(self) -> str:
        """The name of its folder and its listing below the folder of `fetch`."""
        return short_hash("\n".join([self.path, *self.glob]))

    def fetched(self, folder: Path) -> "SourceSettings":
        """This source as the files that `fetch` left in its folder."""
        own = {"path": str(folder / self.key), "glob": ["**/*"]}
        text = {"format": "documents", "encoding": "utf-8", "text_key": "text", "skip_keys": [], "name": ""}
        return self.model_copy(update=own if self.keep else own | text)

    @property
    def patterns(self) -> list[str]:
        """The paths and globs of the files, for `find_inputs`."""
        return [f"{escape(self.path)}/{pattern}" for pattern in self.glob] or [self.path]

    @property
    def files(self) -> list[Path]:
        """The files that exist now."""
        return [path for pattern in self.patterns for path in find_inputs(pattern, "sources")[0]]

    @property
    def has_pages(self) -> bool:
        """Whether some of its files may be WARC files, by format or name."""
        if self.is_remote:  # by its URL: the result may not change when it is fetched
            return self.format == "warc" or (self.format == "auto" and bool(re.search(r"\b(warc|wet)\b", self.path)))
        return self.format == "warc" or (
            self.format == "auto" and any(WARC_NAME.search(path.name) for path in self.files)
        )
