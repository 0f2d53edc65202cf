"""Prepare the tree of a page for an extractor, so that nothing a reader sees is lost or cut for its markup.

    tree = prepare(deepcopy(page_tree))

trafilatura searches the article in elements that sites of articles use (`BODY_XPATH`). On a page without one it only
collects paragraphs, quotes and tables: headings and lists are lost. It also drops short blocks with an empty link, and
flattens code in lists and tables. Each step below is one pass.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

_HIDDEN = """.//template | .//*[@hidden][not(self::body)] | .//*[@style][not(self::body)]
  [contains(translate(@style, 'DISPLAYNOE \t\r\n', 'displaynoe'), 'display:none')]"""
_WORD = re.compile(r"[^\W_]+")
LOOSE=os.environ.get("LOOSE")
TITLE=os.environ.get("TITLE")
_SPACE = re.compile(r"[ \t\n\r\f]+")
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_KEEPS_SPACE = frozenset(("pre", "textarea", "listing", "xmp", "plaintext", "script", "style"))
_BLOCKS = ("p", "pre", "li", "dd", "blockquote")
_INLINE = frozenset(
    "a abbr acronym b bdi bdo big br cite code data del dfn em font i img ins kbd label mark nobr q s samp small span"
    " strike strong sub sup time tt u var wbr".split()
)
_CONTAINERS = frozenset(("div", "section", "main", "article", "td", "table", "tbody", "tr", "center", "form", "font"))
_MIN_SHARE = float(os.environ.get("SHARE",".9"))  # of the letters of paragraphs: the frame that we name is the smallest element with so many
_MIN_FRAME = 0.1  # … a frame with fewer is none


def prepare(tree: Any) -> Any:
    """Prepare a page, given as its root, in place."""
    for hidden in tree.xpath(_HIDDEN):
        hidden.drop_tree()
    _drop_anchors(tree)
    _fold_space(tree)
    for element in tree.xpath("(.//td | .//th)//*[self::ul or self::ol or self::li]"):  # trafilatura drops them
        if element.tag == "li":
            element.addnext(tree.makeelement("br"))
        element.drop_tag()
    _open_containers(tree)
    for block in list(tree.iter("pre", "listing", "xmp")):
        _flatten(block)
    _forget_names(tree)
    _name_frame(tree)
    return tree


def _drop_anchors(tree: Any) -> None:
    """Unwrap anchors, which are no links, and drop the signs that link to a heading (`¶`, `#`)."""
    for link in list(tree.iter("a")):
        target = link.get("href")
        if target is None:
            link.drop_tag()
        elif target.startswith("#") and not any(map(str.isalnum, link.text_content())) and len(link) == 0:
            link.drop_tree()


def _flatten(block: Any) -> None:
    """Make a block of code a quote that holds its text: trafilatura joins code with the line after it."""
    if os.environ.get("NOSEC") is None:
        for ancestor in block.iterancestors("div"):
            ancestor.tag = "section"
    block.tag = "blockquote"
    block.attrib.clear()
    if "highlight" in block.getparent().get("class", ""):
        del block.getparent().attrib["class"]
    if len(block):
        for line in block.iter("br"):
            line.text = "\n"
        text = "".join(block.itertext())
        for child in list(block):
            block.remove(child)
        block.text = text


def _fold_space(tree: Any) -> None:
    """Fold white space as browsers do, outside of <pre>, blocks of code and `white-space: pre`."""
    kept: set[Any] = set()
    for element in tree.iter():
        if element.getparent() in kept or _keeps_space(element):
            kept.add(element)
        elif element.text:
            element.text = _SPACE.sub(" ", element.text)
        if element.tail and element.getparent() not in kept:
            element.tail = _SPACE.sub(" ", element.tail)


def _keeps_space(element: Any) -> bool:
    if element.tag in _KEEPS_SPACE:
        return True
    if "white-space" in element.get("style", "") and re.search(r"white-space\s*:\s*(pre|break)", element.get("style")):
        return True
    if element.tag != "code" or "\n" not in (element.text or "").strip():
        return False
    parent = element.getparent()
    return len(parent) == 1 and not (parent.text or "").strip() and not (element.tail or "").strip()


def _open_containers(tree: Any) -> None:
    """Turn lists and tables that hold code, headings or tables, which would be flattened, into paragraphs."""
    opened: dict[Any, None] = {}
    for block in tree.iter("pre", "table", *_HEADINGS):
        for ancestor in block.iterancestors("ul", "ol", "dl", "table"):
            if ancestor in opened:
                break
            opened[ancestor] = None
    for part in [part for container in opened for part in _parts(container)]:
        if part.tag in ("li", "dt", "dd", "td", "th"):
            _wrap_text(part)
            first = part[0] if len(part) and part.tag not in ("td", "th") else None
            if first is not None and first.tag == "p":
                first.text = f"- {(first.text or '').lstrip()}"
        part.tag = "section"  # a <div> with many links would be taken for a menu
        part.attrib.clear()


def _parts(container: Any) -> Iterator[Any]:
    """A list and its items, or a table and its rows and cells."""
    yield container
    for child in container:
        if child.tag in ("li", "dt", "dd", "td", "th"):
            yield child
        elif child.tag in ("div", "thead", "tbody", "tfoot", "tr"):
            yield from _parts(child)


def _wrap_text(block: Any) -> None:
    """Put each run of text that is directly in a block into a paragraph."""
    paragraph = None
    if (block.text or "").strip():
        paragraph = block.makeelement("p")
        paragraph.text, block.text = block.text, None
    children = list(block)
    if paragraph is not None:
        block.insert(0, paragraph)
    for child in children:
        if child.tag in _INLINE:
            if paragraph is None:
                paragraph = block.makeelement("p")
                child.addprevious(paragraph)
            paragraph.append(child)
        elif (child.tail or "").strip():
            paragraph = block.makeelement("p")
            paragraph.text, child.tail = child.tail, None
            child.addnext(paragraph)
        else:
            paragraph = None


def _forget_names(tree: Any) -> None:
    """Remove ids that are made of a heading: a section on menus or on sharing is neither a menu nor a share button."""
    for heading in tree.iter(*_HEADINGS):
        words = set(_WORD.findall(heading.text_content().lower()))
        for element in (heading, *heading.iterancestors("div", "section")):
            if (name := element.get("id")) and words.issuperset(_WORD.findall(name.lower())):
                del element.attrib["id"]
                if element.tag == "div":
                    element.tag = "section"


def _name_frame(tree: Any) -> None:
    """Give the article an element by which trafilatura finds it, if the page has none that holds paragraphs."""
    from trafilatura.xpaths import BODY_XPATH

    body = tree.find("body")
    if body is None:
        body = tree  # a page without <body>
    weights, total = _weights(body)
    frames = [found[0] for xpath in BODY_XPATH if (found := xpath(tree))]
    if not total or any(weights.get(frame, 0) > _MIN_FRAME * total for frame in frames):
        return
    article = body
    while inner := [child for child in article if weights.get(child, 0) >= _MIN_SHARE * total]:
        if inner[0].tag not in _CONTAINERS:
            break
        article = inner[0]
    frame = article.makeelement("div", {"class": "post"})
    frame.text, article.text = article.text, None
    frame.extend(list(article))
    article.append(frame)
    if LOOSE:
        for element in [frame, *frame.iter("div", "section", "center", "font")]:
            _wrap_text(element)


def _weights(body: Any) -> tuple[dict[Any, int], int]:
    """Letters of paragraphs, outside of links, in each element that holds some, and in the page."""
    weights: dict[Any, int] = {}
    total = 0
    for block in body.iter(*_BLOCKS):
        if next(block.iterancestors("nav", "footer", "aside", *_BLOCKS), None) is None:
            linked = sum(_count_letters(link) for link in block.iter("a"))
            letters = _count_letters(block) - linked
            total += letters
            for ancestor in block.iterancestors():
                weights[ancestor] = weights.get(ancestor, 0) + letters
    return weights, total


def _count_letters(element: Any) -> int:
    return sum(len(text) - text.count(" ") for text in element.itertext())
