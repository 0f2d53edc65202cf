"""Prepare the tree of a page for an extractor, so that headings, lists and code survive.

    tree = prepare(deepcopy(page_tree))

trafilatura looks for the article in elements that news sites use (`BODY_XPATH`). In a page without
one it only collects paragraphs, quotes and tables, so headings and lists are lost. It also takes
short blocks with an empty link for menus, drops sections whose id has a word like `share` or
`author`, and flattens code inside lists and tables. Each step below removes one of these causes, in
time linear in the size of the page.
"""

import re
from collections.abc import Iterator
from typing import Any

from lxml.etree import SubElement, strip_tags

_HIDDEN = """.//template | .//*[@hidden][not(self::body)] | .//*[@style][not(self::body)]
  [contains(translate(@style, 'DISPLAYNOE \t\r\n', 'displaynoe'), 'display:none')]"""
_SPACE = re.compile(r"[ \t\n\r\f]+")
_LISTS_IN_CELLS = ".//*[self::ul or self::ol or self::li][ancestor::td or ancestor::th]"  # cells first is quadratic
_KEEPS_SPACE = re.compile(r"white-space\s*:\s*(pre|break-spaces)", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]{2,}")
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_CODE = ("pre", "listing", "xmp")
_BLOCKS = ("p", "li", "dd", "blockquote")
_ITEMS = ("li", "dt", "dd")
_CELLS = ("td", "th")
_INLINE = frozenset(
    "a abbr acronym b bdi bdo big br cite code data del dfn em font i img ins kbd label mark nobr q s samp small span"
    " strike strong sub sup time tt u var wbr".split()
)
_CONTAINERS = frozenset(("div", "section", "main", "article", "td", "table", "tbody", "tr", "center", "form", "font"))
_UNWRAPPED = "unwrapped"  # the tag of elements about to be replaced by their content
_MIN_SHARE = 0.97  # of the letters of paragraphs: the smallest element with this share becomes the frame
_MIN_FRAME = 0.1  # same; an element that trafilatura would take needs this share: not `<div id="main-nav">`
_MAX_PARAGRAPHS = 20_000  # trafilatura's time for a frame is quadratic: 3 s; longer pages lose headings
_MAX_ID = 200  # characters; a longer id is not made of a heading


def prepare(tree: Any) -> Any:
    """Prepare a page, given as its root, in place."""
    alive = list(tree.iter())  # lxml makes the Python objects of elements once, not at every pass
    for hidden in tree.xpath(_HIDDEN):
        hidden.drop_tree()
    _unwrap(tree)
    _fold_space(tree)
    _open_containers(tree)
    _forget_ids(tree)
    _name_frame(tree)
    for block in list(tree.iter(*_CODE)):
        _quote_code(block)
    del alive
    return tree


def _unwrap(tree: Any) -> None:
    """Unwrap anchors, code in code and DocBook's `guimenu`; drop signs that link to a heading."""
    for link in list(tree.iter("a")):
        target = link.get("href")
        if target is None:  # an anchor
            link.tag = _UNWRAPPED
        elif target.startswith("#") and not len(link) and not any(map(str.isalnum, link.text or "")):
            link.drop_tree()
    for inline in tree.xpath(".//code//code | .//span[starts-with(@class, 'gui')]"):
        inline.tag = _UNWRAPPED
    strip_tags(tree, _UNWRAPPED)


def _fold_space(tree: Any) -> None:
    """Fold white space as browsers do: outside of <pre>, blocks of code and `white-space: pre`."""
    blocks = [*tree.iter("script", "style", "textarea", *_CODE), *filter(_is_block_of_code, tree.iter("code"))]
    blocks += [styled for styled in tree.xpath(".//*[@style]") if _KEEPS_SPACE.search(styled.get("style"))]
    inside = {element for block in blocks for element in block.iterdescendants()}
    kept = inside.union(blocks)
    for element in tree.iter():
        if (text := element.text) and element not in kept:
            element.text = _SPACE.sub(" ", text)
        if (text := element.tail) and element not in inside:
            element.tail = _SPACE.sub(" ", text)


def _is_block_of_code(code: Any) -> bool:
    """Whether <code> has several lines and is all that its parent holds."""
    parent = code.getparent()
    is_only = code.getprevious() is None and code.getnext() is None
    is_alone = is_only and not (parent.text or "").strip() and not (code.tail or "").strip()
    return is_alone and "\n" in "".join(code.itertext()).strip()


def _open_containers(tree: Any) -> None:
    """Turn lists, tables and quotations with headings, code or tables inside into sections."""
    for element in tree.xpath(_LISTS_IN_CELLS):  # trafilatura drops them
        if element.tag == "li":
            element.addnext(element.makeelement("br"))
        element.tag = _UNWRAPPED
    strip_tags(tree, _UNWRAPPED)
    opened: dict[Any, None] = {}
    for block in tree.iter("table", *_CODE, *_HEADINGS):
        for container in block.iterancestors("ul", "ol", "dl", "table", "blockquote"):
            if container in opened:
                break
            opened[container] = None
    for part in [part for container in opened for part in _parts(container)]:
        if part.tag in _ITEMS or part.tag in _CELLS or part.tag == "blockquote":
            _wrap_text(part)
            if part.tag in _ITEMS and len(part) and part[0].tag == "p":
                part[0].text = f"- {(part[0].text or '').lstrip()}"
        part.tag = "section"  # a <div> with many links would be taken for a menu
        part.attrib.clear()


def _parts(container: Any) -> Iterator[Any]:
    """A list and its items, or a table with its rows and cells."""
    yield container
    for child in container:
        if child.tag in _ITEMS or child.tag in _CELLS:
            yield child
        elif child.tag in ("div", "thead", "tbody", "tfoot", "tr"):
            yield from _parts(child)


def _wrap_text(block: Any) -> None:
    """Put each run of text that is directly in a block into a paragraph."""
    paragraph, children = None, list(block)
    if (block.text or "").strip():
        paragraph = block.makeelement("p")
        paragraph.text, block.text = block.text, None
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


def _quote_code(block: Any) -> None:
    """Turn a block of code into a quotation: trafilatura joins code with the line after it."""
    for ancestor in block.iterancestors("div"):
        ancestor.tag = "section"
    parent = block.getparent()
    if parent is None:
        return
    if "highlight" in parent.get("class", ""):
        del parent.attrib["class"]
    for line in block.iter("br"):
        line.text = "\n"
    text = "".join(block.itertext())
    for child in list(block):
        block.remove(child)
    block.tag, block.text = "blockquote", text
    block.attrib.clear()


def _forget_ids(tree: Any) -> None:
    """Remove ids made of a heading: a section about menus is not a menu."""
    for heading in tree.iter(*_HEADINGS):
        words = set(_WORD.findall("".join(heading.itertext()).lower()))
        for element in (heading, *heading.iterancestors("div", "section")):
            name = element.get("id")
            if name and len(name) <= _MAX_ID and words.issuperset(_WORD.findall(name.lower())):
                del element.attrib["id"]
                if element is not heading:
                    element.tag = "section"


def _name_frame(tree: Any) -> None:
    """Wrap the article in an element that trafilatura recognises, if the page has none."""
    from trafilatura.xpaths import BODY_XPATH

    body = tree.find("body")
    body = tree if body is None else body
    weights = _weights(body)
    total = weights.get(body, 0)
    own = body.makeelement("body")  # with empty copies of the elements that may be a frame
    for element, letters in weights.items():
        if letters > _MIN_FRAME * total:
            SubElement(own, element.tag, element.attrib)
    too_long = sum(1 for _ in body.iter("p")) > _MAX_PARAGRAPHS
    if not total or too_long or any(xpath(own) for xpath in BODY_XPATH):
        return
    article = body
    while inner := [child for child in article if weights.get(child, 0) >= _MIN_SHARE * total]:
        headings = (one for child in inner[0].itersiblings(preceding=True) for one in child.iter("h2", "h3", "h4"))
        if inner[0].tag not in _CONTAINERS or next(headings, None) is not None:
            break
        article = inner[0]
    frame = article.makeelement("div", {"class": "post"})
    frame.text, article.text = article.text, None
    frame.extend(list(article))
    article.append(frame)


def _weights(body: Any) -> dict[Any, int]:
    """The letters of paragraphs, without links, in each element that holds some."""
    weights: dict[Any, int] = {}
    for block in body.iter(*_BLOCKS):
        if next(block.iterancestors("nav", "footer", "aside", *_BLOCKS), None) is None:
            letters = _count_letters(block) - sum(map(_count_letters, block.iter("a")))
            for ancestor in block.iterancestors():
                weights[ancestor] = weights.get(ancestor, 0) + letters
    return weights


def _count_letters(element: Any) -> int:
    return sum(len(text) - text.count(" ") for text in element.itertext())
