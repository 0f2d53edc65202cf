"""Articles from the English text of every installation: Python's `help()` topics and docstrings.

An article has about fifteen hundred characters of plain text in paragraphs. It suits a tiny model
that has two minutes to learn English: sentences with code, tables, lists of names, markup or rare
words are left out, and no paragraph comes twice. Modules are read, never imported.
"""

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

_ENOUGH = 1500  # characters after which the next article starts
_SMALLEST = 600  # characters; what remains of a module is dropped if it is shorter, as `clean` would drop it
_PACKAGES = ("networkx", "nltk", "numpy", "scipy")  # the toolkit needs them, or what it needs does
_NO_LIBRARY = frozenset(
    {"site-packages", "test", "tests", "testing", "idlelib", "turtledemo", "ensurepip", "lib2to3", "distutils"}
)
_SHORTEST, _LONGEST, _FEWEST = 30, 200, 5  # characters and words of a sentence
_WORDS = 0.85  # minimum share of ordinary words in a sentence
_COMMON = 12  # times that every word of a sentence occurs in all of them
_TRIPLE_QUOTED = re.compile(r'"""(.*?)"""', re.DOTALL)  # docstrings, and a few others
_WORD = re.compile(r"[a-z']+")
_BREAK = re.compile(r"\n\s*\n|\n(?=\s*(?:[*+-]|\d+\.) )")  # between paragraphs or list items
_BULLET = re.compile(r"(?:[*+-]|\d+\.|\(\d+\)) +")
_SENTENCE = re.compile(r"(?<=[.!?])(?<!\bi\.e\.)(?<!\be\.g\.)\s+(?=[A-Z])")
_ROLE = re.compile(r":[a-z:]+:`~?([^`<]+)`")  # :class:`Name` in reStructuredText
_LITERAL = re.compile(r"""(\*\*|``|["'`*])([A-Za-z_][\w.]*(?:\(\))?)\1""")
_NO_PROSE = re.compile(r"""[=<>{}|\\@#\[\]^~`$*_%&\d"()/]|::| : |\.\.\.|--|\bXXX\b|\bTODO\b""")


def sentence(text: str) -> str:
    """A sentence without quotes and stars around names; "" unless it is plain English."""
    text = _LITERAL.sub(r"\2", _ROLE.sub(r"\1", text))
    words = text.split()
    if not _SHORTEST <= len(text) <= _LONGEST or len(words) < _FEWEST or not text[0].isupper() or text[-1] not in ".!?":
        return ""
    letters = [word.strip(".,;:!?()\"'") for word in words]
    ordinary = sum(word.isalpha() and (word[1:].islower() or len(word) == 1) for word in letters)  # capitals only first
    return "" if ordinary < _WORDS * len(words) or _NO_PROSE.search(text) else text


def paragraphs(text: str) -> Iterator[list[str]]:
    """The sentences of a text, by paragraph or list item; those without any are left out."""
    for block in _BREAK.split(text):
        line = _BULLET.sub("", " ".join(block.split()), count=1)
        if sentences := list(filter(None, map(sentence, _SENTENCE.split(line)))):
            yield sentences


def split_articles(title: str, blocks: Iterable[str], seen: set[str]) -> Iterator[tuple[str, str]]:
    """Articles (title, text) from the paragraphs that are not in `seen`; adds them to it."""
    part: list[str] = []
    number = 1
    for block in blocks:
        if block in seen:
            continue
        seen.add(block)
        part.append(block)
        if sum(map(len, part)) >= _ENOUGH:
            yield _numbered(title, number), "\n\n".join(part)
            part, number = [], number + 1
    if sum(map(len, part)) >= _SMALLEST:
        yield _numbered(title, number), "\n\n".join(part)


def _numbered(title: str, number: int) -> str:
    return title if number == 1 else f"{title}, part {number}"


def _sources() -> Iterator[tuple[str, Iterable[str]]]:
    """(title, texts) of each help topic, and each module of Python and of a few packages."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield f"About {name.replace('-', ' ')}", [text]
    yield from _modules(Path(sysconfig.get_path("stdlib")))
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from _modules(Path(folder), package)


def _modules(folder: Path, *package: str) -> Iterator[tuple[str, Iterable[str]]]:
    for path in sorted(folder.rglob("*.py")):
        module = (*package, *path.relative_to(folder).with_suffix("").parts)
        if not _NO_LIBRARY.intersection(module):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield f"Module {'.'.join(module)}", _TRIPLE_QUOTED.findall(text)


def plain_texts(sources: Iterable[tuple[str, Iterable[str]]]) -> Iterator[tuple[str, list[str]]]:
    """(title, paragraphs) of (title, texts): the sentences whose words are common in all texts."""
    read = [(title, [paragraph for text in texts for paragraph in paragraphs(text)]) for title, texts in sources]
    counts = Counter(word for _, blocks in read for block in blocks for line in block for word in _words(line))
    for title, blocks in read:
        plain = ([line for line in block if all(counts[word] >= _COMMON for word in _words(line))] for block in blocks)
        yield title, [" ".join(block) for block in plain if block]


def _words(line: str) -> list[str]:
    return _WORD.findall(line.lower())


def python_articles() -> Mapping[str, str]:
    """Articles by title: about five hundred, 0.6 MB in all.

    They depend only on the versions of Python and of the packages.
    """
    seen: set[str] = set()
    texts = plain_texts(_sources())
    return {title: text for name, blocks in texts for title, text in split_articles(name, blocks, seen)}
