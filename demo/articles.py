"""Makes articles from the English prose that every Python carries: `help()` topics and standard library docstrings.

An article has one to three thousand characters of plain text: paragraphs, lists and underlined headings, which
`demo.pages` turns into HTML. Code, grammar and markup are left out, so that a tiny model can learn sentences. Modules
are read, never imported.
"""

import ast
import re
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

_SMALLEST = 600  # characters; shorter texts are dropped
_ENOUGH, _LONG = 1200, 3000  # characters after which a heading, or any block, starts the next article
_NO_LIBRARY = frozenset({"site-packages", "test", "tests", "idlelib", "turtledemo", "ensurepip", "lib2to3"})
_LONG_DOCSTRING = 500  # characters
_SHORTEST = 40  # characters of a sentence
_LETTERS = 0.65  # minimum share of letters in prose; code and operator tables have fewer
_CODE = re.compile(r">>>|\.\.\. |::=|^\s*(?:def|class|import|from|for|if|try|with|async|@\w+)\b.*:?$", re.MULTILINE)
_SENTENCE_ENDS = (".", ":", "!", "?", ")", '"')
_LITERAL = re.compile(r"""(["'`*]{1,2})([A-Za-z_][\w.]*(?:\(\))?)\1""")
_HEADING = re.compile(r"(?P<title>\S.*)\n(?P<line>([*=~^-])\3{2,})")


def heading(block: str) -> str | None:
    """The title, if a block is an underlined line; else None."""
    match = _HEADING.fullmatch(block)
    return match["title"] if match else None


def prose(block: str) -> str:
    """A block without indentation, and without quotes and stars around names; "" for code, grammar and tables."""
    block = textwrap.dedent(block).strip()
    letters = sum(map(str.isalpha, block))
    if len(block) < _SHORTEST or letters < _LETTERS * len(block) or _CODE.search(block):
        return ""
    return _LITERAL.sub(r"\2", block) if block.endswith(_SENTENCE_ENDS) else ""


def split_articles(title: str, text: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Split the prose of a long text into (title, text) at its headings, or else between paragraphs.

    Long blocks in `seen` are left out, because the topics quote each other.
    """
    blocks: list[str] = []
    size = 0
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        found = heading(block)
        if size >= _LONG or (found and size >= _ENOUGH):
            yield title, "\n\n".join(blocks)
            blocks, size = [], 0
        if found and not blocks:
            title = found
            continue
        if not found and not (block := prose(block)):
            continue
        if len(block) > 60:
            if block in seen:
                continue
            seen.add(block)
        blocks.append(block)
        size += len(block)
    if size >= _SMALLEST:
        yield title, "\n\n".join(blocks)


def docstrings(path: Path) -> str:
    """The long docstrings in a Python file; those of functions and classes follow their name as a heading.

    Empty for a file that does not parse, because the library contains templates and deliberately broken files.
    """
    try:
        module = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ""
    texts: list[str] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            if len(docstring) >= _LONG_DOCSTRING:
                name = "" if isinstance(node, ast.Module) else f"{node.name}\n{'=' * max(3, len(node.name))}\n\n"
                texts.append(name + docstring)
    return "\n\n".join(texts)


def _library() -> Iterator[tuple[str, str]]:
    """(module name, docstrings) of each standard library module, sorted by name."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library).with_suffix("")
        if not _NO_LIBRARY.intersection(module.parts):
            yield ".".join(module.parts), docstrings(path)


def python_articles() -> Mapping[str, str]:
    """Articles by title: a few hundred, over half a megabyte in all; they depend only on the Python version."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    articles: dict[str, str] = {}
    sources = [*((name.replace("-", " ").capitalize(), text) for name, text in sorted(topics.items())), *_library()]
    for name, text in sources:
        for title, part in split_articles(name, text, seen):
            number = 1
            while (unique := title if number == 1 else f"{title}, part {number}") in articles:
                number += 1
            articles[unique] = part
    return articles
