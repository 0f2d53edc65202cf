"""Listings: the files of a remote source, listed once into a file of the run.

    {"url": "hf://datasets/o/n/data/*.parquet", "listed": "2026-11-29T16:20:11+00:00",
     "root": "hf://datasets/o/n@COMMIT/data/",
     "files": [{"name": "0.parquet", "size": 2147509487, "check": "sha256:…", "run": ""}]}

FOLDER/KEY.json is the listing of a source, FOLDER/KEY/NAME a fetched file. It fixes the input: what
has changed since is refused, and only a renewal lists again.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from fsspec.utils import glob_translate

from common.errors import ConfigError, InputError
from common.files import is_left_out, read_json, short_hash, train_split, write_json
from common.page import size as amount
from common.settings import CorpusSettings, SourceSettings
from corpus.remote.stores import Entry, Store, open_store, read_file

PIECE = ".documents.jsonl.zst"
"""The end of the name of a file's text, which replaces a file that is not kept."""
_LIST = re.compile(r".*\.paths(\.gz)?")
_has_magic = re.compile(r"[*?[]").search
_LONGEST = 255 - len(".tmp")  # bytes of a part of a path
_DEEPEST = 50  # folders in each other
_COMMIT = re.compile(r"@[0-9a-f]{40}(?=/)")
_LIBRARIES = {"hf": "huggingface_hub", "s3": "boto3"}


@dataclass(frozen=True)
class Listing:
    """The files of one source, in the order of their names."""

    url: str
    listed: str
    """When, in UTC."""
    root: str
    """The URL before the names; on the Hub with the commit."""
    files: tuple[Entry, ...]

    @property
    def wanted(self) -> list[Entry]:
        """The files that no run of `base` has read."""
        return [file for file in self.files if not file.run]

    @property
    def identity(self) -> str:
        """A hash of what is to be fetched; the same for a new commit with equal files."""
        return short_hash("\n".join(f"{file.name} {file.size} {file.check}" for file in self.wanted))

    def missing(self, folder: Path, source: SourceSettings) -> list[Entry]:
        """The files that are not in the folder of the source yet."""
        return [file for file in self.wanted if not local(folder, source, file.name).exists()]


def local(folder: Path, source: SourceSettings, name: str, keep: bool | None = None) -> Path:
    """Where a fetched file lies, or its text if the source, or `keep`, says not to keep it."""
    return folder / source.key / (name if (source.keep if keep is None else keep) else name + PIECE)


def read_listing(folder: Path, source: SourceSettings) -> Listing | None:
    """The listing of a source, if there is one. Raises InputError for a damaged file."""
    path = folder / f"{source.key}.json"
    return _read(path) if path.is_file() else None


def _read(path: Path) -> Listing:
    cure = "delete it to list the source again"
    try:
        given = read_json(path, cure)
        return Listing(**{**given, "files": tuple(Entry(**file) for file in given["files"])})
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not a listing ({error}); {cure}") from None


def write_listing(folder: Path, source: SourceSettings, old: Listing | None, listing: Listing) -> str:
    """Replace a listing, and remove changed files that were fetched. Returns what is new."""
    then, now = ({file.name: file for file in each.files} if each else {} for each in (old, listing))
    changed = [name for name, file in then.items() if now.get(name) != file]
    for name in changed:
        for fetched in (name, f"{name}.tmp", name + PIECE):
            (folder / source.key / fetched).unlink(missing_ok=True)
    write_json(folder / f"{source.key}.json", listing)
    gone = len(then.keys() - now)
    if old is None:
        return f"{len(now):,} files listed"
    return f"{len(now.keys() - then):,} files are new, {len(changed) - gone:,} have changed, {gone:,} are gone"


def list_source(source: SourceSettings, settings: CorpusSettings) -> Listing:
    """List the files of a source. Raises ToolkitError, also if there are none."""
    store, path = open_store(source, source.path, settings)
    patterns = [f"{path.rstrip('/')}/{pattern}".lstrip("/") for pattern in source.glob]
    if not patterns or _LIST.fullmatch(path):
        patterns = [path]
    entries = {entry.name: entry for each in patterns for entry in _expand(store, each, source, settings)}
    if unknown := [name for name, entry in entries.items() if entry.size is None and not entry.check]:
        known = {entry.name: entry for entry in store.details(unknown)}
        if gone := [name for name in unknown if name not in known]:
            raise InputError(f"{source.path}: names {len(gone):,} files that do not exist, such as {gone[0]}")
        entries |= known
    folders = (f"{path.rstrip('/')}/", _fixed(patterns), "")  # a list names what it likes
    fixed = next(folder for folder in folders if all(name.startswith(folder) for name in entries))
    names = {name.removeprefix(fixed): entry for name, entry in entries.items()}
    files = tuple(replace(names[name], name=name) for name in sorted(names) if not is_left_out(name))
    if not files:
        raise InputError(f"{source.path}: no file there, or none that `glob` matches")
    check_names([file.name for file in files], source.path)
    return Listing(source.path, datetime.now(UTC).isoformat(timespec="seconds"), store.url(fixed), files)


def _fixed(patterns: Sequence[str]) -> str:
    """The folder that all patterns begin with, with a slash at its end."""
    fixed = ""
    for parts in zip(*(pattern.split("/")[:-1] for pattern in patterns), strict=False):
        if len(set(parts)) > 1 or _has_magic(parts[0]):
            break
        fixed += f"{parts[0]}/"
    return fixed


def _expand(store: Store, pattern: str, source: SourceSettings, settings: CorpusSettings) -> Iterator[Entry]:
    """The files of a path, a folder, a glob or a list of paths."""
    if _has_magic(pattern):
        yield from _walk(store, "", pattern.split("/"))
    elif pattern and not pattern.endswith("/") and (found := store.find(pattern)):
        yield from _listed(store, pattern, source, settings) if _LIST.fullmatch(pattern) else [found]
    else:
        folder = f"{pattern.rstrip('/')}/".lstrip("/")
        every = {entry.name.removeprefix(folder): entry for entry in _walk(store, folder, ["**"])}
        tables = train_split(Path(name) for name in every if name.endswith((".parquet", ".arrow")))
        yield from (every[name] for name in [str(table) for table in tables] or every)


def _walk(store: Store, folder: str, parts: Sequence[str], below: str = "") -> Iterator[Entry]:
    """The files in a folder that a glob matches. `**` matches any folders, also `below`."""
    head, *rest = parts
    if rest and not _has_magic(head):
        yield from _walk(store, f"{folder}{head}/", rest)
        return
    if folder.count("/") > _DEEPEST:
        raise InputError(f"{store.url(folder)}: is {_DEEPEST} folders deep, perhaps in a circle; use `glob`")
    matches = re.compile(glob_translate("/".join(parts))).match
    for entry in store.entries(folder):
        name = entry.name.removeprefix(folder)
        if not name.endswith("/"):
            yield from [entry] if matches(below + name) else ()
        elif head == "**" and not is_left_out(name):
            yield from _walk(store, entry.name, parts, below + name)
        elif rest and fnmatchcase(name[:-1], head):
            yield from _walk(store, entry.name, rest)


def _listed(store: Store, path: str, source: SourceSettings, settings: CorpusSettings) -> Iterator[Entry]:
    """The files that one of Common Crawl's lists names, below the root of the store."""
    content = read_file(store, path, settings)
    try:
        lines = (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content).decode().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{store.url(path)}: not a list of paths ({error})") from None
    wanted = [re.compile(glob_translate(f"**/{pattern}")).match for pattern in source.glob]
    for name in (line.strip().removeprefix(store.root) for line in lines if line.strip()):
        if "://" in name:
            raise InputError(f"{store.url(path)}: names {name}, which is not below {store.root}")
        if not wanted or any(matches(name) for matches in wanted):
            yield Entry(name)


def check_names(names: Sequence[str], source: str) -> None:
    """Raise InputError for names that cannot be those of different files below one folder."""
    taken = dict[str, str]()
    for name in names:
        parts = name.split("/")
        if any(part in ("", ".", "..") or re.search(r"[\x00-\x1f]", part) for part in parts):
            raise InputError(f"{source}: lists {name!r}, which is no path below a folder; leave it out with `glob`")
        if max(len(part.encode()) for part in parts) > _LONGEST:
            raise InputError(f"{source}: lists {name!r}, a part of which has more than {_LONGEST} bytes")
        folders = ["/".join(parts[:end]) + "/" for end in range(1, len(parts))]
        for path in (*folders, name):
            other = taken.setdefault(path.rstrip("/").casefold(), path)
            if other != path:
                raise InputError(f"{source}: lists {other!r} and {path!r}, which are one on some systems; use `glob`")


def without(base: Iterable[Path], listing: Listing) -> Listing:
    """A listing that names the run at each file that a run of `base` has fetched.

    `base`: the folders of fetched files. Raises InputError if such a file has changed.
    """
    known = dict[str, Entry]()
    for folder in base:
        for given in map(_read, sorted(folder.glob(f"{'?' * 16}.json"))):  # of keys
            run = str(folder.parent)
            known.update((_lasting(given.root + file.name), replace(file, run=file.run or run)) for file in given.files)
    files = []
    for file in listing.files:
        then = known.get(_lasting(listing.root + file.name))
        if then and (then.size, then.check) != (file.size, file.check):
            cure = "leave it out with `glob`, or start a run without `base`"
            raise InputError(f"{listing.root}{file.name}: has changed since {then.run} has read it; {cure}")
        files.append(replace(file, run=then.run) if then else file)
    return replace(listing, files=tuple(files))


def _lasting(url: str) -> str:
    """A URL without the commit, which other changes of a repository move."""
    return _COMMIT.sub("", url, count=1)


def fetched_sources(settings: CorpusSettings) -> list[tuple[SourceSettings, Listing]]:
    """The remote sources with their listings. Raises InputError if one is not listed."""
    pairs = []
    for source in settings.remote_sources:
        listing = read_listing(settings.fetch_folder, source)
        if listing is None:
            raise InputError(f"{source.path}: not fetched yet; run python -m corpus.fetch first")
        pairs.append((source, listing))
    return pairs


def origin_in(folder: Path, pairs: Iterable[tuple[SourceSettings, Listing]]) -> Callable[[str], str]:
    """A function that turns the path of a fetched file, or FILE:LINE, into its URL."""
    roots = {f"{folder / source.key}/": listing.root for source, listing in pairs}

    def origin(place: str) -> str:
        return next((root + place.removeprefix(path) for path, root in roots.items() if place.startswith(path)), place)

    return origin


def check_extras(settings: CorpusSettings) -> None:
    """Raise ConfigError for a source without the library of its store, or without a contact."""
    for source in settings.remote_sources:
        library = _LIBRARIES.get(source.path.partition("://")[0])
        if library and find_spec(library) is None:
            raise ConfigError(f"sources: {source.path} needs {library}; pip install 'urls-to-gpt2[remote]'")
        if source.path.endswith((".parquet", ".arrow")) and find_spec("pyarrow") is None:
            raise ConfigError(f"sources: {source.path} needs pyarrow; pip install 'urls-to-gpt2[parquet]'")
        if not library and not (settings.scrape.contact or settings.scrape.resolve):
            raise ConfigError(f"scrape.contact is empty: set a mail address or page to fetch {source.path}")


def describe(folder: Path, source: SourceSettings, listing: Listing | None) -> str:
    """What of a source is to be fetched, by its listing; empty if nothing is. Uses no network."""
    if listing is None:
        return f"{source.path}: not listed yet; python -m corpus.fetch --list tells how much there is to fetch"
    if not (missing := listing.missing(folder, source)):
        return ""
    total, unknown = sum(file.size or 0 for file in missing), sum(file.size is None for file in missing)
    more = f" and {unknown:,} of unknown size" if unknown else ""
    return f"{source.path}: {len(missing):,} files, {amount(total)}{more} to fetch, listed {listing.listed[:10]}"
