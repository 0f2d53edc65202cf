"""What extractors keep of documentation: headings, paragraphs, tables, lists and code.

A page is its own gold. Navigation does not count: see `_CHROME`, and blocks that are mostly links.
A phrase is a run of four words, or all words of a shorter block. A line break is mid-sentence if
the two words before and the two after it are neighbours in the page.
"""

import gzip
import hashlib
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.extract import Article, phrases, reader
from benchmarks.harness import Row
from common.errors import InputError

EXTRACTORS = ("trafilatura, fast", "ours: trafilatura", "ours: resiliparse")
_SUFFIXES = (".html", ".htm", ".xhtml", ".html.gz")
_MIN_LETTERS = 500  # shorter pages are frames, redirections and lists of names
_LONG = 40  # words of a long paragraph
_INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark nobr q s samp small span"
    " strike strong sub sup time tt u var wbr".split()
)
_CHROME = """.//script | .//style | .//template | .//head | .//nav | .//header | .//footer | .//aside | .//form |
  .//*[@role='navigation' or @role='search' or @role='contentinfo' or @hidden] |
  .//*[re:test(@class, '(^|[\\s_-])(nav|navigation|navbar|sidebar|toc|footer|menu|breadcrumbs?|headerlink)')] |
  .//*[contains(@id, 'sidebar')] |
  .//*[re:test(@class, 'sphinxsidebar|navigat|nav-panel|navheader|navfooter|contents-level')]"""


def read_pages(folder: Path, count: int) -> list[Article]:
    """`count` pages of a folder, chosen by hash. Raises InputError if it has none."""
    paths = [path for path in folder.rglob("*") if path.name.endswith(_SUFFIXES) and path.is_file()]
    paths.sort(key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest())
    pages: dict[bytes, Article] = {}
    for path in paths:
        body = path.read_bytes()
        body = gzip.decompress(body) if path.suffix == ".gz" else body
        if len(re.sub(rb"<[^>]*>|\s", b"", body)) >= _MIN_LETTERS:
            pages.setdefault(hashlib.sha256(body).digest(), Article(f"http://one.example/{path.name}", body, "", True))
        if len(pages) == count:
            break
    if not pages:
        raise InputError(f"{folder}: no HTML pages; name folders of unpacked packages with --texts")
    return list(pages.values())


def compare_with_page(html: str, text: str) -> Counter[str]:
    """Counts of what the page has (`headings`) and the text keeps (`headings kept`); breaks."""
    from lxml.html import document_fromstring

    tree = document_fromstring(html.encode("utf-8", "ignore"), parser=_parser())
    for element in tree.xpath(_CHROME, namespaces={"re": "http://exslt.org/regular-expressions"}):
        if element.getparent() is not None:
            element.drop_tree()
    lines = text.split("\n")
    plain = Counter(map(_letters, lines))
    counts: Counter[str] = Counter()
    for heading in tree.iter("h2", "h3", "h4"):
        if name := _letters(" ".join(heading.itertext())):
            counts["headings"] += 1
            counts["headings kept"] += plain[name] > 0
            plain[name] -= 1
    words = re.findall(r"\w+", text)
    runs = {tuple(words[start : start + length]) for start in range(len(words)) for length in (1, 2, 3, 4)}
    for kind, xpath in (("paragraphs", ".//p"), ("tables", ".//table[count(.//tr) > 1]"), ("dl", ".//dl")):
        for block in tree.xpath(xpath):
            wanted = [phrase for run in _runs(block) for phrase in phrases(run)]
            if not _is_links(block) and (kind != "paragraphs" or len(wanted) > _LONG - 4):
                counts[kind] += len(wanted)
                counts[f"{kind} kept"] += sum(phrase in runs for phrase in wanted)
    code = [line.rstrip() for block in tree.iter("pre") for line in "".join(block.itertext()).split("\n")]
    left = Counter(line.rstrip() for line in lines)
    for line in filter(None, code):
        counts["pre"] += 1
        counts["pre kept"] += left[line] > 0
        left[line] -= 1
    prose = {phrase for run in _runs(tree) for phrase in phrases(run)}
    lines = [line for line in lines if line.strip() and line.rstrip() not in set(code)]
    counts["lines"] += len(lines)
    counts["breaks"] += sum(
        len(one) > 1 and len(two) > 1 and (*one[-2:], *two[:2]) in prose
        for one, two in pairwise(re.findall(r"\w+", line) for line in lines)
    )
    return counts


def _parser() -> Any:
    from lxml.html import HTMLParser

    return HTMLParser(encoding="utf-8", huge_tree=True, remove_comments=True, remove_pis=True)


def _letters(text: str) -> str:
    return "".join(re.findall(r"\w+", text)).casefold()


def _is_links(block: Any) -> bool:
    linked = sum(len(_letters("".join(link.itertext()))) for link in block.iter("a"))
    return bool(3 * linked > 2 * len(_letters("".join(block.itertext()))))


def _runs(block: Any) -> Iterator[list[str]]:
    """The words of each run of text in a block, up to the next element of block level or <br>."""
    for text in _text(block).split("\0"):
        if words := re.findall(r"\w+", text):
            yield words


def _text(element: Any) -> str:
    """The text of an element without code; \\0 where an element of block level begins or ends."""
    text = ""
    if element.tag != "pre":
        text = (element.text or "") + "".join(_text(child) + (child.tail or "") for child in element)
    return text if element.tag in _INLINE else f"\0{text}\0"


def measure(arguments: Namespace) -> Iterator[Row]:
    """Documentation: what is kept of headings, tables, lists and code, against trafilatura."""
    from corpus.extract.charset import decode

    folders: list[Path] = arguments.texts or []
    if not folders:
        raise InputError("name the folders of unpacked documentation packages with --texts")
    for name in EXTRACTORS:
        read, total = reader(name), Counter[str]()
        for folder in folders:
            counts = Counter[str]()
            for page in read_pages(folder, arguments.count):
                counts += compare_with_page(decode(page.body, "text/html"), read(page))
                counts["pages"] += 1
            total += counts
            yield {"pages of": folder.name, **_row(name, counts)}
        yield {"pages of": "all", **_row(name, total)}


def _row(name: str, counts: Counter[str]) -> Row:
    kinds = ("headings", "paragraphs", "tables", "dl", "pre")
    return {
        "extractor": name,
        "pages": counts["pages"],
        **{f"{kind} kept": counts[f"{kind} kept"] / counts[kind] if counts[kind] else "-" for kind in kinds},
        "breaks per 100 lines": 100 * counts["breaks"] / max(1, counts["lines"]),
    }
