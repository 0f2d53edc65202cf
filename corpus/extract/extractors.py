"""HTML to text. Extractors are tried in order; the first that finds text wins.

    extracted = extract(body, "text/html; charset=utf-8", url, load_extractors(["trafilatura"]))

An extractor is a pure function of the page: no network, no clock. `corpus.extract.pool` runs it in
a process that can be killed. A new one is a function below, an entry in `_EXTRACTORS`, and its name
under `ScrapeSettings.extractors`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.errors import PageError
from corpus.extract.charset import decode
from corpus.extract.tree import prepare

# Extraction takes 2 KB and 0.1 ms per tag, so this many take 450 MB and exceed extract_timeout.
# The largest of 181 real pages has 3,229.
MAX_TAGS = 250_000
_PARAGRAPH = re.compile(r"<(p|div|br|h[1-6]|li|td|pre)\b", re.IGNORECASE)
_MIN_LINK_SHARE = 2 / 3  # of a paragraph's letters; 0.5 to 0.9 give the same F1 within 0.001
_WARM_UP = "<html><body><article><h1>Title</h1><p>The first page is slow.</p></article></body></html>"


@dataclass(frozen=True)
class Extracted:
    """The result of an extractor. The text is valid UTF-8 without NUL."""

    text: str
    title: str
    date: str
    """ISO date of publication; empty if none was found."""
    extractor: str


@dataclass(frozen=True)
class HtmlPage:
    """The input of an extractor."""

    html: str
    url: str

    @cached_property
    def tree(self) -> Any:
        """The page parsed by lxml; extractors must not change it. None if it is not HTML."""
        from trafilatura import load_html

        tree = load_html(self.html)
        # load_html refuses a body that begins without <html>, which HTML allows
        return load_html(f"<html>{self.html}") if tree is None and _PARAGRAPH.search(self.html) else tree

    @property
    def prepared(self) -> Any:
        """A copy of the tree, prepared by `corpus.extract.tree`."""
        return prepare(deepcopy(self.tree))

    @property
    def date(self) -> str:
        """ISO date of publication from the page's metadata, or empty.

        Always by htmldate: newspaper completes "May 2019" from today's date, so its result would
        change daily.
        """
        from trafilatura.metadata import find_date

        if self.tree is None:
            return ""
        # the extensive search takes a quarter of the extraction time; max_date: no clock
        options = {"original_date": True, "extensive_search": False, "max_date": "2100-01-01"}
        return find_date(self.tree, url=self.url, **options) or ""


Extractor = Callable[[HtmlPage], Extracted | None]
"""Returns the text of a page, or None if it finds none."""


def _clean(text: str | None) -> str:
    """Remove NUL and lone surrogates, which JSON and UTF-8 files cannot hold."""
    return (text or "").replace("\x00", "").encode("utf-8", "ignore").decode("utf-8")


# ------------------------------------------------------------ extractors


def _trafilatura(page: HtmlPage) -> Extracted | None:
    from trafilatura.core import bare_extraction
    from trafilatura.metadata import examine_meta, extract_title

    if page.tree is None:
        return None
    # fast: without trafilatura's fallbacks: F1 .962 instead of .960 on 181 real pages, at 1.2 times
    # the speed. All metadata would take a third of the time; we need title and date
    document = bare_extraction(page.prepared, url=page.url, fast=True, include_comments=False)
    if document is None or isinstance(document, dict):
        return None
    title = " ".join((examine_meta(page.tree).title or extract_title(page.tree) or "").split())
    text = without_boilerplate(document.text, title, page.tree)
    return Extracted(_clean(text), _clean(title), page.date, "trafilatura")


def _newspaper(page: HtmlPage) -> Extracted:
    from lxml.html import tostring
    from newspaper import Article

    article = Article(page.url, fetch_images=False)  # otherwise parse() fetches images from the network
    article.set_html(page.html if page.tree is None else tostring(page.prepared, encoding="unicode"))
    article.parse()
    return Extracted(_clean(article.text), _clean(article.title), page.date, "newspaper3k")


def _resiliparse(page: HtmlPage) -> Extracted:
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree, NodeType

    tree = HTMLTree.parse(page.html)
    body: Any = tree.body or ()
    # resiliparse knows `hidden`, not styles. A walk, as each item of a query's result costs a pass
    # over the page
    styled = (node for node in body if node.type == NodeType.ELEMENT and node.hasattr("style"))
    for element in [node for node in styled if "display:none" in "".join(node["style"].lower().split())]:
        element["hidden"] = ""
    # lxml takes longer for the whole page than resiliparse for everything, so it gets the head only
    head = HtmlPage(f"<html>{tree.head.html if tree.head else ''}<body><p></p></body></html>", page.url)
    title = " ".join((tree.title or "").split())
    # F1 .934 on 181 real pages; .898 with comments, the texts of images, author and date lines
    options: dict[str, Any] = {"main_content": True, "alt_texts": False, "comments": False, "post_meta": False}
    return Extracted(_clean(extract_plain_text(tree, **options)), _clean(title), head.date, "resiliparse")


_EXTRACTORS: Mapping[str, Extractor] = {
    "trafilatura": _trafilatura,
    "newspaper3k": _newspaper,
    "resiliparse": _resiliparse,
}


def load_extractors(names: Sequence[str]) -> list[Extractor]:
    """The named extractors, with their libraries imported. Raises ImportError if one is missing."""
    extractors = [_EXTRACTORS[name] for name in names]
    for extractor in extractors:
        extractor(HtmlPage(_WARM_UP, ""))
    return extractors


def extract(body: bytes, content_type: str, url: str, extractors: Sequence[Extractor]) -> Extracted:
    """Extract the text of a page with the first extractor that finds any.

    Plain text is returned unchanged. Raises MemoryError, and PageError if there is no text:
    `extract_empty`, `extract_error` if an extractor failed, or `too_many_tags`.
    """
    html = decode(body, content_type, url)
    if content_type.lower().lstrip().startswith("text/plain"):
        if not html.strip():
            raise PageError("extract_empty")
        return Extracted(_clean(html), "", "", "plain")
    if html.count("<") > MAX_TAGS:
        raise PageError("too_many_tags")
    page, reason = HtmlPage(html, url), "extract_empty"
    for extractor in extractors:
        try:
            extracted = extractor(page)
        except MemoryError:
            raise
        except Exception:  # a library may fail on a page that the next one can read
            reason = "extract_error"
            continue
        if extracted is not None and extracted.text.strip():
            return extracted
    raise PageError(reason)


# ------------------------------------------------------------ quality


def without_boilerplate(text: str, title: str, tree: Any) -> str:
    """Remove the title at the beginning, which has its own field, and link paragraphs.

    A title that is also the heading of a section stays: the page is a part of a book. A link
    paragraph is mostly a link: "Read more: …", "Sign up for our newsletter". A page that would lose
    half its text is a list of links and stays unchanged. F1 .958 -> .961; on the 990 pages
    .920 -> .922.
    """
    lines = text.split("\n")
    heading = _letters(title)
    sections = _headings(tree, "h2", "h3", "h4") - _headings(tree, "h1")
    while lines and (first := _letters(lines[0])) in heading and first not in sections:
        del lines[0]
    links = set(_link_paragraphs(tree))
    kept = "\n".join(line for line in lines if _letters(line) not in links)
    return kept if 2 * len(kept) > len(text) else text


def _headings(tree: Any, *tags: str) -> set[str]:
    return {_letters("".join(heading.itertext())) for heading in tree.iter(*tags)}


def _link_paragraphs(tree: Any) -> Iterator[str]:
    for paragraph in tree.xpath("//p[.//a]"):
        letters = _letters("".join(paragraph.itertext()))
        linked = sum(len(_letters("".join(link.itertext()))) for link in paragraph.iter("a"))
        if letters and linked > _MIN_LINK_SHARE * len(letters):
            yield letters


def _letters(text: str) -> str:
    """A text without white space and case, for comparison."""
    return "".join(text.split()).casefold()
