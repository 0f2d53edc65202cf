"""Inputs of the corpus benchmarks: texts and documents, the same in every run."""

import gzip
import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle
from pathlib import Path

from common.errors import InputError
from common.files import Document, document_writer, short_hash

COPIED = (0.01, 0.03, 0.05, 0.06, 0.07, 0.08, 0.09)
"""Shares of words that are replaced in near duplicates."""


def read_texts(folders: Sequence[Path]) -> Iterator[str]:
    """The texts in the folders, languages mixed; without folders Python's documentation, endless.

    Raises InputError for a folder without texts.
    """
    from pydoc_data.topics import topics

    return chain.from_iterable(map(_folder_texts, folders)) if folders else cycle(topics.values())


def _folder_texts(folder: Path) -> Iterator[str]:
    import trafilatura

    files = [path for path in folder.rglob("*") if re.search(r"\.(html|txt)(\.gz)?$", path.name) and path.is_file()]
    if not files:
        raise InputError(f"{folder}: no file that ends in .html, .txt, .html.gz or .txt.gz")
    for path in sorted(files, key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest()):
        body = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = trafilatura.extract(body, fast=True) if ".html" in path.suffixes else body.decode("utf-8", "replace")
        if text:
            yield text


def cut(texts: Iterator[str], count: int) -> list[Document]:
    """Up to `count` documents cut from the texts, log-uniform from 500 to 16,000 characters."""
    chance, documents = random.Random(1), list[Document]()
    for text in texts:
        start = 0
        while start + 500 < len(text) and len(documents) < count:
            size = int(10 ** chance.uniform(2.7, 4.2))
            documents.append({"id": short_hash(f"{len(documents)}"), "text": text[start : start + size]})
            start += size
        if len(documents) == count:
            break
    return documents


def with_copies(count: int, shares: Sequence[float] = COPIED) -> list[Document]:
    """Documents of 3,000 characters made of real sentences; each fifth is a copy of the one before.

    A copy has `changed`, one of `shares`: that share of its words was replaced.
    """
    from pydoc_data.topics import topics

    chance = random.Random(1)
    parts = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", " ".join(topics.values())))
    pool = [sentence for sentence in parts if len(sentence) > 20]
    words = " ".join(pool).split()
    documents: list[Document] = []
    for number in range(count):
        document: Document = {"id": f"{number:016x}", "text": ""}
        if number % 5 == 4:
            share = document["changed"] = chance.choice(shares)
            original = documents[-1]["text"].split(" ")
            document["text"] = " ".join(chance.choice(words) if chance.random() < share else word for word in original)
        else:
            while len(document["text"]) < 3000:
                document["text"] += chance.choice(pool) + " "
        documents.append(document)
    return documents


def write_documents(path: Path, documents: Iterable[Document]) -> Path:
    """Write a shard, and return its path."""
    with document_writer(path) as write:
        for document in documents:
            write(document)
    return path
