"""English prose that every Python carries: the topics of `help()` and the docstrings of the standard library.

Both become articles of one to three thousand characters: paragraphs, lists and underlined headings in plain text,
which `demo.pages` turns into HTML. Code, grammar and markup are left out, so that a tiny model can learn sentences.
Modules are read, never imported.
"""

import ast
import re
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

_SMALLEST = 600  # characters; less makes no article
_ENOUGH, _LONG = 1200, 3000  # characters after which a heading, or any block, begins the next article
_NO_LIBRARY = frozenset({"site-packages", "test", "tests", "idlelib", "turtledemo", "ensurepip", "lib2to3"})
_LONG_DOCSTRING = 500  # characters
_SHORTEST = 40  # characters of a block that is a sentence
_LETTERS = 0.65  # least share of letters in prose; code and tables of operators have less
_CODE = re.compile(r">>>|\.\.\. |::=|^\s*(?:def|class|import|from|for|if|try|with|async|@\w+)\b.*:?$", re.MULTILINE)
_SENTENCE_ENDS = (".", ":", "!", "?", ")", '"')
_LITERAL = re.compile(r"""(["'`*]{1,2})([A-Za-z_][\w.]*(?:\(\))?)\1""")
_HEADING = re.compile(r"(?P<title>\S.*)\n(?P<line>([*=~^-])\3{2,})")


def heading(block: str) -> str | None:
    """The title of a block that is an underlined line, else None."""
    match = _HEADING.fullmatch(block)
    return match["title"] if match else None


def prose(block: str) -> str:
    """A block without indentation and without quotes and stars around names; "" for code, grammar and tables."""
    block = textwrap.dedent(block).strip()
    letters = sum(map(str.isalpha, block))
    if len(block) < _SHORTEST or letters < _LETTERS * len(block) or _CODE.search(block):
        return ""
    return _LITERAL.sub(r"\2", block) if block.endswith(_SENTENCE_ENDS) else ""


def split_articles(title: str, text: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Cut the prose of one long text into (title, text) at its headings, or between paragraphs where it has none.

    Long blocks already in `seen` are left out: the topics quote each other, and a corpus of copies is no corpus.
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
    """The long docstrings in a Python file, which is not run; a function's or class's follows its name as a heading.

    Empty for a file that does not parse: templates and deliberately broken files lie among the modules.
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
    """(module name, its docstrings) of the standard library, by name."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library).with_suffix("")
        if not _NO_LIBRARY.intersection(module.parts):
            yield ".".join(module.parts), docstrings(path)


def python_articles() -> Mapping[str, str]:
    """Articles by title: a few hundred, well over half a megabyte, the same for one version of Python."""
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
