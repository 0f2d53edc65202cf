"""The formats of existing text, recognised by content and name, and their readers.

A new format is a reader in this package and a row in READERS, _NOUNS, _NAMES and, if its files begin alike, _BEGINS.
"""

import codecs
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import InputError
from common.files import COMPRESSED, BadLines, kind_of, read_head
from common.settings import WARC_NAME, SourceSettings
from corpus.runner import Outcome
from corpus.sources.lines import read_csv, read_jsonl, read_text, read_wikiextractor
from corpus.sources.tables import read_arrow, read_parquet

READERS: dict[str, Callable[[Path, SourceSettings, BadLines], Iterator[Outcome]]] = {
    "jsonl": read_jsonl,
    "text": read_text,
    "wikiextractor": read_wikiextractor,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
}
"""All formats but `warc`, whose pages must be extracted first: `corpus.scrape.offline` does that."""
_NOUNS = {
    "jsonl": "JSON lines",
    "text": "text",
    "wikiextractor": "WikiExtractor's output",
    "csv": "CSV",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "warc": "WARC",
}
_NAMES = {
    "warc": WARC_NAME,
    "text": re.compile(r"\.txt$"),
    "wikiextractor": re.compile(r"^wiki_\d+$"),
    "csv": re.compile(r"\.(csv|tsv)$"),
    "jsonl": re.compile(r"\.(json|jsonl|ndjson)$"),
    "parquet": re.compile(r"\.parquet$"),
    "arrow": re.compile(r"\.(arrow|feather)$"),
}
"""What the names of a format's files have, without the suffix of a compressed one."""
_BEGINS = (
    (rb"\s*\{", "jsonl", "JSON lines", ""),
    (rb"\s*<doc ", "wikiextractor", "WikiExtractor's output", ""),
    (rb"\s*\[\s*[\[{]", "", "one JSON array", "write one object per line, for example with jq -c '.[]'"),
    (rb"(?i)\s*<(!doctype html|html|\?xml)", "", "a page of HTML or XML", "extract its text, or set format: text"),
    (rb"crawl-data/\S+\n", "", "a list of Common Crawl's paths", "end its name in .paths(.gz), name it as a path"),
    (rb"[^\0]*\Z", "text", "text", "set format, such as text for a document per file, or leave it out with glob"),
    (rb"", "", "binary data", "leave it out with glob"),
)  # fmt: skip
"""Beginnings of content without magic bytes: the format, if there is one, its name, and the cure."""
_TEXTS = {"jsonl": ("jsonl", "text"), "csv": ("text",), "wikiextractor": ("wikiextractor", "jsonl", "text")}
"""Patterns for the beginning of files, by format."""
_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _content(head: bytes) -> tuple[str, str, str]:
    """The format of a file that begins with `head`, or ""; what it is; and the cure if it cannot be read as it is."""
    kind, cure = kind_of(head)
    if kind:
        return next((format for format, noun in _NOUNS.items() if noun == kind), ""), kind, cure
    return next((format, noun, cure) for pattern, format, noun, cure in _BEGINS if re.match(pattern, head))


def recognised(path: Path, source: SourceSettings) -> tuple[str, SourceSettings]:
    """The format of a file, and the source with the file's encoding.

    Raises InputError for a file that is something else than its source or its name says, or that no reader takes.
    """
    name = path.stem if path.suffix in COMPRESSED else path.name
    named = next((format for format, pattern in _NAMES.items() if pattern.search(name)), "")
    wanted = named if source.format == "auto" else source.format
    if not path.is_file():  # a pipe can be read only once
        return wanted or "jsonl", source
    packed, head = read_head(path)
    if head.startswith(_MARKS) and source.encoding == "utf-8":
        source = source.model_copy(update={"encoding": "utf-16"})
    if source.encoding != "utf-8" and wanted not in ("parquet", "arrow", "warc"):
        head = head.decode(source.encoding, "replace").removeprefix("\ufeff").encode()
    found, noun, cure = _content(head.removeprefix(codecs.BOM_UTF8))
    if wanted == "text" or not head:  # any text may be one; what is none is a bad line
        return wanted or "jsonl", source
    noun = f"{packed}-compressed {noun}" if packed else noun
    if found == "warc" and not wanted:
        raise InputError(f"{path}: {noun}; set format: warc, or end its name in .warc{packed}")
    if not wanted and (not found or found == "text"):
        raise InputError(f"{path}: {noun}; {cure}")
    wanted = wanted or found
    if found not in _TEXTS.get(wanted, (wanted,)):
        cure = f"set format: {found}, or rename it" if found else cure
        raise InputError(f"{path}: {noun}, not {_NOUNS[wanted]}; {cure}")
    if packed and (wanted in ("parquet", "arrow") or (wanted == "warc" and packed in (".bz2", ".xz"))):
        raise InputError(f"{path}: {noun}; decompress it")
    if wanted != "warc" and packed != (path.suffix if path.suffix in COMPRESSED else ""):
        cure = f"end its name in {packed}" if packed else f"remove {path.suffix} from its name"
        raise InputError(f"{path}: {noun}{'' if packed else ', not compressed'}; {cure}")
    return wanted, source
