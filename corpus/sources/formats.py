"""The formats of existing text, recognised by content and name, and their readers.

A new format is a reader in this package, a row of FORMATS and, if its files begin alike, a row of
_BEGINS.
"""

import codecs
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.errors import InputError
from common.files import COMPRESSED, BadLines, kind_of, read_head
from common.settings import WARC_NAME, SourceSettings
from corpus.runner import Outcome
from corpus.sources.lines import read_csv, read_jsonl, read_own, read_text, read_wikiextractor
from corpus.sources.tables import read_arrow, read_parquet

Reader = Callable[[Path, SourceSettings, BadLines], Iterator[Outcome]]


class Format(NamedTuple):
    """One format of existing text."""

    noun: str
    name: re.Pattern[str]
    """What the names of its files match, without the suffix of a compressed one."""
    read: Reader | None
    others: tuple[str, ...] = ()
    """Other formats that its content may look like."""


FORMATS = {
    "warc": Format("WARC", WARC_NAME, None),  # its pages must be extracted first: corpus/scrape/offline.py
    "documents": Format("documents of a step", re.compile(r"\.documents\.jsonl$"), read_own, ("jsonl", "text")),
    "jsonl": Format("JSON lines", re.compile(r"\.(json|jsonl|ndjson)$"), read_jsonl, ("text",)),
    "text": Format("text", re.compile(r"\.txt$"), read_text),
    "wikiextractor": Format("WikiExtractor's output", re.compile(r"^wiki_\d+$"), read_wikiextractor, ("jsonl", "text")),
    "csv": Format("CSV", re.compile(r"\.(csv|tsv)$"), read_csv, ("text",)),
    "parquet": Format("Parquet", re.compile(r"\.parquet$"), read_parquet),
    "arrow": Format("Arrow", re.compile(r"\.(arrow|feather)$"), read_arrow),
}
READERS = {name: format.read for name, format in FORMATS.items() if format.read}
_BEGINS = (
    (rb"\s*\{", "jsonl", FORMATS["jsonl"].noun, ""),
    (rb"\s*<doc ", "wikiextractor", FORMATS["wikiextractor"].noun, ""),
    (rb"\s*\[\s*[\[{]", "", "one JSON array", "write one object per line, for example with jq -c '.[]'"),
    (rb"(?i)\s*<(!doctype html|html|\?xml)", "", "a page of HTML or XML", "extract its text, or set format: text"),
    (rb"crawl-data/\S+\n", "", "a list of Common Crawl's paths", "end its name in .paths(.gz), name it as a path"),
    (rb"[^\0]*\Z", "text", "text", "set format, such as text for a document per file, or leave it out with glob"),
    (rb"", "", "binary data", "leave it out with glob"),
)  # fmt: skip
"""Content without magic bytes: how it begins, its format or "", what it is, the cure."""
_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _content(head: bytes) -> tuple[str, str, str]:
    """The format of a file that begins with `head`, or ""; what it is; the cure if unreadable."""
    kind, cure = kind_of(head)
    if kind:
        return next((name for name, format in FORMATS.items() if format.noun == kind), ""), kind, cure
    return next((format, noun, cure) for pattern, format, noun, cure in _BEGINS if re.match(pattern, head))


def recognised(path: Path, source: SourceSettings) -> tuple[str, SourceSettings]:
    """The format of a file, and the source with the file's encoding.

    Raises InputError if the content is not what source or name say, or has no reader.
    """
    name = path.stem if path.suffix in COMPRESSED else path.name
    named = next((format for format, known in FORMATS.items() if known.name.search(name)), "")
    wanted = named if source.format == "auto" else source.format
    if not path.is_file():  # a pipe can be read only once
        return wanted or "jsonl", source
    packed, head = read_head(path)
    if head.startswith(_MARKS) and source.encoding == "utf-8":
        source = source.model_copy(update={"encoding": "utf-16"})
    if source.encoding != "utf-8" and wanted not in ("parquet", "arrow", "warc"):
        head = head.decode(source.encoding, "replace").removeprefix("\ufeff").encode()
    actual, noun, cure = _content(head.removeprefix(codecs.BOM_UTF8))
    if wanted == "text" or not head:  # content that is not text is a bad line
        return wanted or "jsonl", source
    noun = f"{packed}-compressed {noun}" if packed else noun
    if actual == "warc" and not wanted:
        raise InputError(f"{path}: {noun}; set format: warc, or end its name in .warc{packed}")
    if not wanted and (not actual or actual == "text"):
        raise InputError(f"{path}: {noun}; {cure}")
    wanted = wanted or actual
    if actual not in (wanted, *FORMATS[wanted].others):
        cure = f"set format: {actual}, or rename it" if actual else cure
        raise InputError(f"{path}: {noun}, not {FORMATS[wanted].noun}; {cure}")
    if packed and (wanted in ("parquet", "arrow") or (wanted == "warc" and packed in (".bz2", ".xz"))):
        raise InputError(f"{path}: {noun}; decompress it")
    if wanted != "warc" and packed != (path.suffix if path.suffix in COMPRESSED else ""):
        cure = f"end its name in {packed}" if packed else f"remove {path.suffix} from its name"
        raise InputError(f"{path}: {noun}{'' if packed else ', not compressed'}; {cure}")
    return wanted, source
