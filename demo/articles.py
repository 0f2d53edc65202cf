"""English text that every Python carries: the topics of `help()` and the docstrings of the standard library.

Both become articles of one to three thousand characters, in reStructuredText's plain look, which `demo.pages` turns
into HTML. Modules are read, never imported.
"""

import ast
import inspect
import re
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

_SMALLEST = 600  # characters; less makes no article
_ENOUGH, _LONG = 1200, 3000  # characters after which a heading, or any block, begins the next article
_NO_LIBRARY = frozenset({"site-packages", "test", "tests", "idlelib", "turtledemo", "ensurepip", "lib2to3"})
_LONG_DOCSTRING = 1200
_HEADING = re.compile(r"(?P<title>\S.*)\n(?P<line>([*=~^-])\3{2,})")


def heading(block: str) -> str | None:
    """The title of a block that is an underlined line, else None."""
    match = _HEADING.fullmatch(block)
    return match["title"] if match else None


def split_articles(title: str, text: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Cut one long text into (title, text) at its headings, or between paragraphs where it has none.

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
        if len(block) > 60:
            if block in seen:
                continue
            seen.add(block)
        blocks.append(block)
        size += len(block)
    if size >= _SMALLEST:
        yield title, "\n\n".join(blocks)


def module_docstring(path: Path) -> str:
    """The docstring of a Python file, "" where it has none; only the head of the file is read."""
    with path.open("rb") as file:
        try:
            for token in tokenize.tokenize(file.readline):
                if token.type not in (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL):
                    value = ast.literal_eval(token.string) if token.type == tokenize.STRING else ""
                    return inspect.cleandoc(value) if isinstance(value, str) else ""
        except (SyntaxError, ValueError, tokenize.TokenError):
            pass  # templates and deliberately broken files lie among the modules
    return ""


def _docstrings() -> Iterator[tuple[str, str]]:
    """(module name, docstring) of the standard library's modules with a long one, by name."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library).with_suffix("")
        if not _NO_LIBRARY.intersection(module.parts):
            docstring = module_docstring(path)
            if len(docstring) >= _LONG_DOCSTRING:
                yield ".".join(module.parts), docstring


def python_articles() -> Mapping[str, str]:
    """Articles by title: a few hundred, about half a megabyte, the same for one version of Python."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    articles: dict[str, str] = {}
    sources = [*((name.replace("-", " ").capitalize(), text) for name, text in sorted(topics.items())), *_docstrings()]
    for name, text in sources:
        for title, part in split_articles(name, text, seen):
            number = 1
            while (unique := title if number == 1 else f"{title}, part {number}") in articles:
                number += 1
            articles[unique] = part
    return articles
