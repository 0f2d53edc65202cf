"""Makes articles from the English sentences that every Python carries: `help()` topics and docstrings.

An article has about fifteen hundred characters of plain text in paragraphs. Code, tables, lists of names and markup are
left out sentence by sentence, and no paragraph comes twice, so that a tiny model can learn English from it. Modules are
read, never imported.
"""

import ast
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_ENOUGH = 1500  # characters after which the next article starts
_SMALLEST = 600  # characters; what remains of a module is dropped if it is shorter, as `clean` would drop it
_NO_LIBRARY = frozenset(
    {"site-packages", "test", "tests", "idlelib", "turtledemo", "ensurepip", "lib2to3", "distutils"}
)
_SHORTEST, _FEWEST = 30, 5  # characters and words of a sentence
_WORDS = 0.85  # minimum share of ordinary words in a sentence
_BREAK = re.compile(r"\n\s*\n|\n(?=\s*(?:[*+-]|\d+\.) )")  # between paragraphs or list items
_BULLET = re.compile(r"(?:[*+-]|\d+\.|\(\d+\)) +")
_SENTENCE = re.compile(r"(?<=[.!?])(?<!\bi\.e\.)(?<!\be\.g\.)\s+(?=[A-Z])")
_ROLE = re.compile(r":[a-z:]+:`~?([^`<]+)`")  # :class:`Name` in reStructuredText
_LITERAL = re.compile(r"""(\*\*|``|["'`*])([A-Za-z_][\w.]*(?:\(\))?)\1""")
_NO_PROSE = re.compile(r"[=<>{}|\\@#\[\]^~`$*_%&]|::|\.\.\.|--|https?:|\bXXX\b|\bTODO\b|\w\(\w")


def sentence(text: str) -> str:
    """A sentence without quotes and stars around names; "" for what is no plain English sentence."""
    text = _LITERAL.sub(r"\2", _ROLE.sub(r"\1", text))
    words = text.split()
    if len(text) < _SHORTEST or len(words) < _FEWEST or not text[0].isupper() or text[-1] not in ".!?":
        return ""
    ordinary = sum(map(_is_ordinary, words))
    return "" if ordinary < _WORDS * len(words) or _NO_PROSE.search(text) else text


def _is_ordinary(word: str) -> bool:
    """Whether a word has only letters, and capitals only at its start."""
    letters = word.strip(".,;:!?()\"'")
    return letters.isalpha() and (letters[1:].islower() or len(letters) == 1)


def paragraphs(text: str) -> Iterator[str]:
    """The sentences of a text, by paragraph or list item; those without any are left out."""
    for block in _BREAK.split(text):
        line = _BULLET.sub("", " ".join(block.split()), count=1)
        if found := " ".join(filter(None, map(sentence, _SENTENCE.split(line)))):
            yield found


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings in a Python file.

    None for a file that does not parse, because the library contains templates and deliberately broken files.
    """
    try:
        module = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def split_articles(title: str, texts: Iterable[str], seen: set[str]) -> Iterator[tuple[str, str]]:
    """Articles (title, text) from the paragraphs of several texts that are not in `seen`, which they are added to."""
    part: list[str] = []
    number = 1
    for text in texts:
        for paragraph in paragraphs(text):
            if paragraph in seen:
                continue
            seen.add(paragraph)
            part.append(paragraph)
            if sum(map(len, part)) >= _ENOUGH:
                yield _numbered(title, number), "\n\n".join(part)
                part, number = [], number + 1
    if sum(map(len, part)) >= _SMALLEST:
        yield _numbered(title, number), "\n\n".join(part)


def _numbered(title: str, number: int) -> str:
    return title if number == 1 else f"{title}, part {number}"


def _sources() -> Iterator[tuple[str, Iterable[str]]]:
    """(title, texts) of each help topic and each standard library module, sorted by name."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield f"About {name.replace('-', ' ')}", [text]
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library).with_suffix("")
        if not _NO_LIBRARY.intersection(module.parts):
            yield f"Module {'.'.join(module.parts)}", docstrings(path)


def python_articles() -> Mapping[str, str]:
    """Articles by title: about five hundred, 0.8 MB in all; they depend only on the Python version."""
    seen: set[str] = set()
    return {title: text for name, texts in _sources() for title, text in split_articles(name, texts, seen)}
