"""Characters lost by pages in old encodings: declared, declared wrongly, and not declared at all.

Real pages are re-encoded, with `&#…;` for characters that an encoding lacks, and declare it in one place only. A
character is lost if the decoded page has fewer of it than the original; only non-ASCII characters count. English pages
come from --articles, other languages from --books, a folder with one folder per language (de-DE, zh-TW), and Thai and
Hebrew from the names of countries and languages in Babel's locale data. Other detectors are measured if installed.
"""

import argparse
import html
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module

from benchmarks.extract import ARTICLES, read_articles
from benchmarks.machine import table
from common.cli import input_path
from corpus.extract.charset import decode

# language -> Python's codecs and the labels that pages use
_CODECS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "en": (("cp1252", "windows-1252"), ("utf-16-le", "utf-16le")),
    "fr": (("cp1252", "iso-8859-1"), ("iso8859_15", "iso-8859-15"), ("mac_roman", "macintosh")),
    "de": (("cp1252", "windows-1252"), ("utf-16-be", "utf-16be")),
    "cs": (("cp1250", "windows-1250"), ("iso8859_2", "iso-8859-2")),
    "pl": (("cp1250", "windows-1250"), ("iso8859_2", "iso-8859-2")),
    "ru": (("cp1251", "windows-1251"), ("koi8_r", "koi8-r"), ("iso8859_5", "iso-8859-5"), ("cp866", "ibm866")),
    "el": (("cp1253", "windows-1253"), ("iso8859_7", "iso-8859-7")),
    "tr": (("cp1254", "windows-1254"),),
    "he": (("cp1255", "windows-1255"), ("iso8859_8", "iso-8859-8")),
    "ar": (("cp1256", "windows-1256"),),
    "fa": (("cp1256", "windows-1256"),),
    "th": (("cp874", "tis-620"),),
    "ja": (("cp932", "shift_jis"), ("euc_jp", "euc-jp"), ("iso2022_jp", "iso-2022-jp")),
    "zh-CN": (("gbk", "gb2312"), ("gb18030", "gb18030")),
    "zh-TW": (("big5", "big5"),),
    "ko": (("cp949", "euc-kr"),),
}
_BABEL = ("he", "th")
_TLDS = {"en": "com", "cs": "cz", "el": "gr", "he": "il", "ar": "ma", "fa": "ir", "ja": "jp", "ko": "kr"}
_DECLARATION = re.compile(r"<\?xml[^>]*>|<meta[^>]*charset[^>]*>", re.IGNORECASE)
Counts = Counter[str]


@dataclass(frozen=True)
class _Page:
    """A Unicode page without an encoding declaration."""

    url: str
    text: str


def _pages(language: str, arguments: argparse.Namespace) -> Iterator[_Page]:
    """Up to `--pages` pages of a language with non-ASCII characters; six times as many in English, which has few."""
    url = f"http://one.{_TLDS.get(language, language[-2:].lower())}/"
    if language == "en":
        bodies = [(article.url, article.body) for article in read_articles(arguments.articles)]
    elif language in _BABEL:
        from babel import Locale

        data = Locale.parse(language)
        names = [*data.territories.values(), *data.languages.values(), *data.scripts.values()]
        parts = [names[n :: arguments.pages] for n in range(arguments.pages)]
        bodies = [(url, f"<html><body><p>{html.escape(', '.join(part))}</p></body></html>".encode()) for part in parts]
    else:
        files = sorted(arguments.books.glob(f"{language}*/*.html")) if arguments.books else []
        bodies = [(url, file.read_bytes()) for file in files]
    pages = [_Page(url, undeclared(body)) for url, body in bodies]
    pages = [page for page in pages if _beyond_ascii(page.text)]
    most = arguments.pages * (6 if language == "en" else 1)
    yield from pages[:: max(1, len(pages) // most)][:most]


def undeclared(page: bytes) -> str:
    """A UTF-8 page without its declarations and decoding errors."""
    return _DECLARATION.sub("", page.decode("utf-8", "replace")).replace("\ufffd", "")


def lost_characters(text: str, answer: str) -> tuple[int, int]:
    """(missing, total): the non-ASCII characters of `text` that `answer` lacks, and all of them."""
    wanted = _beyond_ascii(text)
    return (wanted - _beyond_ascii(answer)).total(), wanted.total()


def _beyond_ascii(text: str) -> Counts:
    return Counter(character for character in text if character > "\x9f" and character != "\ufffd")


def _peers() -> Mapping[str, Callable[[bytes], str]]:
    """Other detectors by name; they get the pages without a declaration."""

    def by_name(detect: Callable[[bytes], Mapping[str, str | None]]) -> Callable[[bytes], str]:
        def read(body: bytes) -> str:
            try:
                return body.decode(detect(body)["encoding"] or "utf-8", "replace")
            except LookupError:
                return body.decode("utf-8", "replace")

        return read

    found = {}
    for module in ("charset_normalizer", "chardet", "cchardet"):
        try:
            found[module] = by_name(import_module(module).detect)
        except ImportError:
            continue
    return found


def _declared(text: str, codec: str, label: str) -> Iterator[tuple[str, bytes, str]]:
    """Each way to declare the encoding: its name, the body, the Content-Type header."""

    def encode(start: str) -> bytes:
        return (start + text).encode(codec, "xmlcharrefreplace")

    yield "HTTP", encode(""), f"text/html; charset={label}"
    if codec.startswith("utf-16"):
        yield "mark", encode("\ufeff"), "text/html"
    else:
        yield "<meta>", encode(f'<!DOCTYPE html><head><meta charset="{label}">'), "text/html"
        yield "<?xml>", encode(f'<?xml version="1.0" encoding="{label}"?>'), "text/html"
    yield "nothing", encode(""), "text/html"
    yield "wrong: utf-8", encode(""), "text/html; charset=utf-8"
    yield "wrong: iso-8859-1", encode(""), "text/html; charset=iso-8859-1"


def _row(language: str, codec: str, label: str, pages: list[_Page]) -> dict[str, str]:
    lost: Counts = Counter()
    characters, peers = 0, _peers()
    for page in pages:
        text = page.text.encode(codec, "xmlcharrefreplace").decode(codec)
        for name, body, content_type in _declared(text, codec, label):
            answers = {name: decode(body, content_type, page.url)}
            if name == "nothing":
                answers |= {peer: read(body) for peer, read in peers.items()}
            for reader, answer in answers.items():
                lost[reader] += lost_characters(text, answer)[0]
        characters += _beyond_ascii(text).total()
    names = ["HTTP", "<meta>", "<?xml>", "mark", "nothing", "wrong: utf-8", "wrong: iso-8859-1", *peers]
    shares = {name: f"{lost[name] / max(characters, 1):.2%}" if name in lost else "" for name in names}
    return {"language": language, "encoding": label, "characters": f"{characters:,}", **shares}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--articles",
        type=input_path,
        default=ARTICLES,
        metavar="DIR",
        help=f"folder of English pages (default {ARTICLES})",
    )
    parser.add_argument(
        "--books", type=input_path, metavar="DIR", help="folder of pages in other languages, one folder per language"
    )
    parser.add_argument("--pages", type=int, default=12, metavar="N", help="pages per language (default 12)")


def measure(arguments: argparse.Namespace) -> str:
    """The share of lost characters per encoding and kind of declaration."""
    rows = []
    for language, codecs in _CODECS.items():
        if pages := list(_pages(language, arguments)):
            rows += [_row(language, codec, label, pages) for codec, label in codecs]
    return table(rows)
