"""HTML to text: extractors are tried in order, and the first that finds text wins.

    found = extract(body, "text/html; charset=utf-8", url, load_extractors(["trafilatura"]))

Extractors are pure functions of the page: no network, no clock. `corpus.extract.pool` runs them in processes that can
be killed. A new extractor is a loader below, an entry in `_LOADERS`, and its name under `ScrapeSettings.extractors`.
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

# htmldate: only the page's metadata (the extensive search takes a quarter of the extraction time), and no clock
_DATE_OPTIONS = {"original_date": True, "extensive_search": False, "max_date": "2100-01-01"}


# A tag takes 2 KB and 0.1 ms during extraction, so a page with this many takes 450 MB and exceeds extract_timeout.
# The largest number among 181 real pages is 3,229.
MAX_TAGS = 250_000
_PARAGRAPH = re.compile(r"<(p|div|br|h[1-6]|li|td|pre)\b", re.IGNORECASE)
_MIN_LINK_SHARE = 2 / 3  # of a paragraph's letters; 0.5 to 0.9 give the same F1 within 0.001


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
        """The page parsed by lxml, shared by all extractors, which must not change it; None if it is not HTML.

        load_html refuses a body that begins without <html>, which HTML allows.
        """
        from trafilatura import load_html

        tree = load_html(self.html)
        return load_html(f"<html>{self.html}") if tree is None and _PARAGRAPH.search(self.html) else tree

    @property
    def visible(self) -> Any:
        """A copy of the tree, prepared for extractors: see corpus.extract.tree."""
        return prepare(deepcopy(self.tree))

    @property
    def date(self) -> str:
        """ISO date of publication from the page's metadata, or empty.

        From htmldate: newspaper completes partial dates ("May 2019") from today's, so the result would change daily.
        """
        from trafilatura.metadata import find_date

        return (find_date(self.tree, url=self.url, **_DATE_OPTIONS) or "") if self.tree is not None else ""


Extractor = Callable[[HtmlPage], Extracted | None]
"""Returns the text of a page, or None if it finds none."""


def _clean(text: str | None) -> str:
    """Remove NUL and lone surrogates, which JSON and UTF-8 files cannot hold."""
    return (text or "").replace("\x00", "").encode("utf-8", "ignore").decode("utf-8")


# ------------------------------------------------------------------------------------------------ extractors


def _load_trafilatura() -> Extractor:
    from trafilatura.core import bare_extraction
    from trafilatura.metadata import examine_meta, extract_title

    def run(page: HtmlPage) -> Extracted | None:
        if page.tree is None:
            return None
        # fast: without trafilatura's fallbacks, which our list of extractors replaces; F1 .962 against .960 with them
        # on 181 real pages, at 1.2 times the speed. All metadata would take a third of the time; we need title and date
        found = bare_extraction(page.visible, url=page.url, fast=True, include_comments=False)
        if found is None or isinstance(found, dict):
            return None
        title = " ".join((examine_meta(page.tree).title or extract_title(page.tree) or "").split())
        text = without_boilerplate(found.text, title, page.tree)
        return Extracted(_clean(text), _clean(title), page.date, "trafilatura")

    return run


def _load_newspaper() -> Extractor:
    from lxml.html import tostring
    from newspaper import Article

    def run(page: HtmlPage) -> Extracted | None:
        article = Article(page.url, fetch_images=False)  # otherwise parse() fetches images from the network
        article.set_html(page.html if page.tree is None else tostring(page.visible, encoding="unicode"))
        article.parse()
        return Extracted(_clean(article.text), _clean(article.title), page.date, "newspaper3k")

    return run


def _load_resiliparse() -> Extractor:
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree, NodeType

    # F1 .934 on 181 real pages; .898 with comments, the texts of images and the lines of author and date
    options: dict[str, Any] = {"main_content": True, "alt_texts": False, "comments": False, "post_meta": False}

    def run(page: HtmlPage) -> Extracted | None:
        tree = HTMLTree.parse(page.html)
        body: Any = tree.body or ()
        # a walk, as each access to the result of a query costs a pass over the page; it knows other hidden elements
        styled = (node for node in body if node.type == NodeType.ELEMENT and node.hasattr("style"))
        for element in [node for node in styled if "display:none" in "".join(node["style"].lower().split())]:
            element["hidden"] = ""
        # lxml takes longer for the whole page than resiliparse for everything: it gets the head alone
        head = HtmlPage(f"<html>{tree.head.html if tree.head else ''}<body><p></p></body></html>", page.url)
        title = " ".join((tree.title or "").split())
        return Extracted(_clean(extract_plain_text(tree, **options)), _clean(title), head.date, "resiliparse")

    return run


_LOADERS: Mapping[str, Callable[[], Extractor]] = {
    "trafilatura": _load_trafilatura,
    "newspaper3k": _load_newspaper,
    "resiliparse": _load_resiliparse,
}


def load_extractors(names: Sequence[str]) -> list[Extractor]:
    """Import the libraries of the named extractors."""
    return [_LOADERS[name]() for name in names]


def extract(body: bytes, content_type: str, url: str, extractors: Sequence[Extractor]) -> Extracted:
    """Extract the text of a page with the first extractor that finds any.

    Plain text is returned unchanged. Raises MemoryError, and PageError if there is no text: `extract_empty`,
    `extract_error` if an extractor failed, or `too_many_tags`.
    """
    html = decode(body, content_type, url)
    if content_type.lower().lstrip().startswith("text/plain"):
        if not html.strip():
            raise PageError("extract_empty")
        return Extracted(_clean(html), "", "", "plain")
    if html.count("<") > MAX_TAGS:
        raise PageError("too_many_tags")
    page = HtmlPage(html, url)
    reason = "extract_empty"
    for extractor in extractors:
        try:
            found = extractor(page)
        except MemoryError:
            raise
        except Exception:  # a library may fail on a page that the next one can read
            reason = "extract_error"
            continue
        if found is not None and found.text.strip():
            return found
    raise PageError(reason)


# ------------------------------------------------------------------------------------------------ quality


def without_boilerplate(text: str, title: str, tree: Any) -> str:
    """Remove the title at the beginning, which has its own field, and link paragraphs.

    The heading of a section stays even if it is the title: it is one of a book, of which the page is a part.
    A link paragraph is mostly a link: "Read more: …", "Sign up for our newsletter". A page that would lose half its
    text is a list of links and stays unchanged. F1 .958 -> .961; on the 990 pages .920 -> .922.
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
    """A text without white space and case, for comparison across extractors."""
    return "".join(text.split()).casefold()
