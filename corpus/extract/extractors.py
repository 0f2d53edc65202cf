"""HTML to text: an ordered list of extractors, of which the first good answer wins.

    found = extract(body, "text/html; charset=utf-8", url, load_extractors(["trafilatura", "newspaper3k"]))

Pure functions of the page: no network, no clock. `corpus.extract.pool` runs them where a hung page can be killed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from corpus.extract.quality import holds_the_article, without_furniture

# htmldate: the page's own metadata only (its extensive search costs a quarter of the whole), and no look at the clock
_DATES = {"original_date": True, "extensive_search": False, "max_date": "2100-01-01"}


# A tag takes 2 KB while its page is extracted, and a tenth of a millisecond: such a page takes 450 MB and outlasts
# extract_timeout. The most that one of 181 real pages has is 3,229.
MOST_TAGS = 250_000


@dataclass(frozen=True)
class Extracted:
    """What an extractor found. The text is valid UTF-8 without NUL."""

    text: str
    title: str
    date: str
    """ISO date of publication; empty where none was found."""
    extractor: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class NothingExtracted(Exception):
    """There is no answer; the argument is the reason: `extract_empty`, `extract_error` where an extractor failed, or
    `too_many_tags`.
    """


@dataclass(frozen=True)
class Page:
    """What an extractor sees."""

    html: str
    url: str

    @cached_property
    def tree(self) -> Any:
        """The page as lxml parses it, shared by all its readers, who change nothing; None where it is no HTML."""
        from trafilatura import load_html

        return load_html(self.html)

    @property
    def date(self) -> str:
        """ISO date of publication by the page's own metadata, else empty.

        htmldate's: newspaper's fills what a date lacks ("May 2019") from today's, so that each day gives other bytes.
        """
        from trafilatura.metadata import find_date

        return (find_date(self.tree, url=self.url, **_DATES) or "") if self.tree is not None else ""


Extractor = Callable[[Page], Extracted | None]
"""What was found, if anything."""


def _clean(text: str | None) -> str:
    """Text without NUL and lone surrogates, which no JSON or UTF-8 file can carry."""
    return (text or "").replace("\x00", "").encode("utf-8", "ignore").decode("utf-8")


# ------------------------------------------------------------------------------------------------ extractors


def _load_trafilatura() -> Extractor:
    from trafilatura.core import bare_extraction
    from trafilatura.metadata import examine_meta, extract_title

    def run(page: Page) -> Extracted | None:
        if page.tree is None:
            return None
        # fast: without its own fallbacks, whose place the list of extractors takes; F1 .962 against .960 with them
        # on 181 real pages, and 1.2 times the speed. Of the metadata, which would be a third of the time, only ours.
        found = bare_extraction(page.tree, url=page.url, fast=True, include_comments=False)
        if found is None or isinstance(found, dict):
            return None
        title = " ".join((examine_meta(page.tree).title or extract_title(page.tree) or "").split())
        text = without_furniture(found.text, title, page.tree)
        return Extracted(_clean(text), _clean(title), page.date, "trafilatura")

    return run


def _load_newspaper() -> Extractor:
    from newspaper import Article

    def run(page: Page) -> Extracted | None:
        article = Article(page.url, fetch_images=False)  # otherwise parse() looks images up on the network
        article.set_html(page.html)
        article.parse()
        return Extracted(_clean(article.text), _clean(article.title), page.date, "newspaper3k")

    return run


_LOADERS: Mapping[str, Callable[[], Extractor]] = {"trafilatura": _load_trafilatura, "newspaper3k": _load_newspaper}


def load_extractors(names: Sequence[str]) -> list[Extractor]:
    """The named extractors, their libraries imported."""
    return [_LOADERS[name]() for name in names]


def extract(body: bytes, content_type: str, url: str, extractors: Sequence[Extractor]) -> Extracted:
    """The text of a page: extractors are asked in turn until one holds the article, else the longest answer.

    Plain text is taken as it is. Raises NothingExtracted with the reason when there is no text, MemoryError.
    """
    from corpus.extract.charset import decode

    html = decode(body, content_type, url)
    if content_type.lower().lstrip().startswith("text/plain"):
        if not html.strip():
            raise NothingExtracted("extract_empty")
        return Extracted(_clean(html), "", "", "plain")
    if html.count("<") > MOST_TAGS:
        raise NothingExtracted("too_many_tags")
    page = Page(html, url)
    best: Extracted | None = None
    reason = "extract_empty"
    for extractor in extractors:
        try:
            found = extractor(page)
        except MemoryError:
            raise
        except Exception:  # a library that trips over a page; the next one may not
            reason = "extract_error"
            continue
        if found is None or not found.text.strip() or (best is not None and len(found.text) <= len(best.text)):
            continue
        best = found
        if holds_the_article(best.text, page.tree):
            break
    if best is None:
        raise NothingExtracted(reason)
    return best
