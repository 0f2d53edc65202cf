"""Cleaning: our step against the plain recipe, on the same documents.

The recipe is `ftfy.fix_text` and langdetect on every text, with OpenWebText's rules in the order of corpus.clean.
langdetect is random, so one row shows how often the recipe agrees with itself under another seed: the upper limit.
Documents are cut from the texts of a folder (HTML or .txt, plain or .gz), log-uniform from 500 to 16,000 characters.
Without a folder: Python's own documentation, and lists of frequent words in other languages, which are not sentences.
"""

import argparse
import gzip
import hashlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.machine import alone, table
from common.cli import input_path, positive_int
from common.errors import InputError
from common.files import document_writer, read_documents, short_hash
from common.settings import CleanSettings

_SUFFIXES = (".html", ".html.gz", ".txt", ".txt.gz")
_FOREIGN = ("de", "es", "fr", "it", "nl", "pl", "pt", "ru", "sv", "tr")


class Run(NamedTuple):
    """What one process did."""

    kept: frozenset[str]
    """Ids of the kept documents."""
    seconds: float
    """Wall-clock time; with one worker, nothing waits."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--texts", type=input_path, nargs="+", metavar="DIR", help="folders of real texts; rows for each"
    )
    parser.add_argument("--count", type=positive_int, default=1000, metavar="N", help="documents (default 1,000)")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="rounds per row (default 3)")


def read_texts(folder: Path) -> Iterator[str]:
    """The texts of all files below a folder, in an order that mixes languages. Raises InputError if there are none."""
    import trafilatura

    files = [path for path in folder.rglob("*") if path.name.endswith(_SUFFIXES) and path.is_file()]
    if not files:
        raise InputError(f"{folder}: no file that ends in {', '.join(_SUFFIXES)}")
    for path in sorted(files, key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest()):
        body = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = trafilatura.extract(body, fast=True) if ".html" in path.suffixes else body.decode("utf-8", "replace")
        if text:
            yield text


def _words(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        word for line in lines if not line.startswith("#") for word in line.split()
    ]  # one file begins with a licence


def packaged_texts() -> Iterator[str]:
    """An endless mix of English that every Python carries, and texts of frequent words in other languages."""
    from pydoc_data.topics import topics

    import newspaper

    chance = random.Random(1)
    lists = Path(newspaper.__file__).parent / "resources" / "text"
    words = {code: _words(lists / f"stopwords-{code}.txt") for code in _FOREIGN}
    while True:
        for text in topics.values():
            yield text
            if chance.random() < 0.2:
                yield " ".join(chance.choices(words[chance.choice(_FOREIGN)], k=2000))


def documents(texts: Iterator[str], count: int) -> Iterator[str]:
    """Up to `count` documents cut from the texts; the same in every run."""
    chance = random.Random(1)
    for text in texts:
        start = 0
        while start + 500 < len(text) and count:
            size = int(10 ** chance.uniform(2.7, 4.2))
            yield text[start : start + size]
            start, count = start + size, count - 1
        if not count:
            return


def recipe(source: Path, target: Path, seed: int) -> None:
    """The plain recipe."""
    import ftfy
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = seed
    settings = CleanSettings()
    with document_writer(target) as write:
        for document in read_documents(source):
            text = ftfy.fix_text(document["text"])
            notice = len(text) < settings.javascript_characters and "javascript" in text.lower()
            if notice or len(text) < settings.min_characters:
                continue
            try:
                if detect(text) == settings.language:
                    write({**document, "text": text})
            except LangDetectException:
                continue


def ours(source: Path, target: Path, workers: int) -> None:
    """`corpus.clean`."""
    from corpus.clean import clean

    clean([source], target, CleanSettings(), workers=workers, allow_empty=True)


def _timed(function: Callable[..., None], source: Path, target: Path, last: int) -> Run:
    one = source.with_name("one.jsonl.zst")  # load modules and language profiles before timing
    function(one, target, last if function is recipe else 1)
    started = time.perf_counter()
    function(source, target, last)
    seconds = time.perf_counter() - started
    return Run(frozenset(document["id"] for document in read_documents(target)), seconds)


def measure(arguments: argparse.Namespace) -> str:
    """Rows of documents per second, and of agreement with the recipe."""
    sets = {folder.name: read_texts(folder) for folder in arguments.texts or ()} or {"packaged": packaged_texts()}
    rows = []
    for name, texts in sets.items():
        with TemporaryDirectory() as folder:
            source, target = Path(folder, "in.jsonl.zst"), Path(folder, "out.jsonl.zst")
            found = list(documents(texts, arguments.count))
            for path, chosen in (
                (source, found),
                (source.with_name("one.jsonl.zst"), [*found[:20], "é 1234 " * 100]),
            ):
                with document_writer(path) as write:
                    for number, text in enumerate(chosen):
                        write({"id": short_hash(f"{number}"), "text": text})
            runs: dict[str, list[Run]] = {}
            for _ in range(arguments.rounds):
                for label, function, last in (
                    ("plain recipe", recipe, 0),
                    ("plain recipe, another seed", recipe, 1),
                    ("corpus.clean", ours, 1),
                    ("corpus.clean, 2 workers", ours, 2),
                ):
                    runs.setdefault(label, []).append(alone(_timed, function, source, target, last))
        peer = runs["plain recipe"]
        for label, results in runs.items():
            unlike = len(results[0].kept ^ peer[0].kept)
            rows.append(
                {
                    "texts": name,
                    "cleaning": label,
                    "documents": f"{len(found):,}",
                    "kept": f"{len(results[0].kept):,}",
                    "decided alike": f"{100 - 100 * unlike / len(found):.2f} %",
                    "documents/s": f"{len(found) / median(run.seconds for run in results):,.0f}",
                    "ratio": f"{median(p.seconds / r.seconds for p, r in zip(peer, results, strict=True)):.2f}",
                }
            )
    return table(rows)
