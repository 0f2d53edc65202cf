"""Deduplication: signatures and the whole step against datasketch and rensa, and recall of planted duplicates.

Documents of about 3 KB are assembled from sentences of real text; one in five is a copy of another with some words
replaced. Recall is over pairs of original and copy, by their true Jaccard similarity (sets of Python strings).
"""

import argparse
import random
import re
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import orjson

from benchmarks.machine import table
from common.cli import input_path, positive_int
from common.files import Document, document_writer, read_documents, read_lines
from common.settings import DedupSettings

_CHARACTERS = 3000
_SHARES = (0.01, 0.03, 0.05, 0.06, 0.07, 0.08, 0.09)  # of words that a copy replaces


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--count", type=positive_int, default=5000, metavar="N", help="documents (default 5,000)")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="rounds per row (default 3)")
    parser.add_argument("--texts", type=input_path, metavar="DIR", help="*.txt instead of Python's own documentation")


def sentences(folder: Path | None) -> list[str]:
    """Sentences of real text."""
    if folder is not None:
        text = " ".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt")))
    else:
        from pydoc_data.topics import topics

        text = " ".join(topics.values())
    return [sentence for part in re.split(r"(?<=[.!?])\s+", text) if len(sentence := " ".join(part.split())) > 20]


def make_documents(count: int, folder: Path | None) -> tuple[list[Document], list[tuple[int, int]]]:
    """The documents, and the pairs (original, copy) planted among them."""
    chance = random.Random(1)
    pool = sentences(folder)
    words = " ".join(pool).split()
    documents: list[Document] = []
    planted = []
    for number in range(count):
        if number % 5 == 4:
            original = chance.randrange(number)
            share = chance.choice(_SHARES)
            old = documents[original]["text"].split(" ")
            text = " ".join(chance.choice(words) if chance.random() < share else word for word in old)
            planted.append((original, number))
        else:
            text = ""
            while len(text) < _CHARACTERS:
                text += chance.choice(pool) + " "
        documents.append({"id": f"{number:016x}", "text": text})
    return documents, planted


def similarity(one: str, other: str) -> float:
    """True Jaccard similarity of character 5-grams."""
    a, b = ({text[start : start + 5] for start in range(len(text) - 4)} for text in (one, other))
    return len(a & b) / len(a | b)


def _ngrams(text: str) -> list[str]:
    return list({text[start : start + 5] for start in range(len(text) - 4)})


def our_signatures(documents: list[Document]) -> None:
    """MinHash with 120 permutations over character 5-grams, as in our step."""
    from corpus.dedup.shingles import MinHasher

    hasher = MinHasher(DedupSettings())
    for document in documents:
        hasher.signature(document["text"])


def rensa_signatures(documents: list[Document]) -> None:
    """The same with rensa's R-MinHash."""
    from rensa import RMinHash

    for document in documents:
        minhash = RMinHash(num_perm=120, seed=1)
        minhash.update(_ngrams(document["text"]))
        minhash.digest()


def _datasketch(document: Document) -> "object":
    from datasketch import MinHash

    minhash = MinHash(num_perm=120, seed=1)
    minhash.update_batch([shingle.encode() for shingle in _ngrams(document["text"])])
    return minhash


def datasketch_signatures(documents: list[Document]) -> None:
    """The same with datasketch's fastest path."""
    for document in documents:
        _datasketch(document)


def datasketch_dedup(source: Path) -> int:
    """datasketch's recipe: MinHash and MinHashLSH with the same bands; keeps the first document, verifies nothing."""
    from datasketch import MinHashLSH

    index = MinHashLSH(num_perm=120, params=(20, 6))
    kept = 0
    for document in read_documents(source):
        minhash = _datasketch(document)
        if not index.query(minhash):
            kept += 1
            index.insert(document["id"], minhash)
    return kept


def our_dedup(source: Path, target: Path) -> int:
    """`corpus.dedup run`, with reading, signatures, verification and writing."""
    from corpus.dedup.run import dedup

    return dedup([source], target, DedupSettings()).documents_out


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _found(documents: list[Document], planted: list[tuple[int, int]], target: Path) -> Iterator[dict[str, object]]:
    """Recall by similarity, and precision: clustered documents that truly resemble another one in their cluster."""
    survivor = {
        d["id"]: d["survivor"] for path in (target / "removed").glob("*") for d in map(orjson.loads, read_lines(path))
    }
    cluster: dict[str, list[int]] = {}
    for number, document in enumerate(documents):
        cluster.setdefault(str(survivor.get(document["id"], document["id"])), []).append(number)
    of = {number: name for name, members in cluster.items() for number in members}
    true = [(pair, similarity(documents[pair[0]]["text"], documents[pair[1]]["text"])) for pair in planted]
    for least in (0.7, 0.8):
        pairs = [pair for pair, value in true if value >= least]
        share = sum(of[one] == of[other] for one, other in pairs) / len(pairs)
        yield {"measure": f"pairs at Jaccard >= {least}", "of": f"{len(pairs):,}", "share": f"{share:.4f}"}
    clusters = [members for members in cluster.values() if len(members) > 1][:300]
    checked = right = 0
    for members in clusters:
        for number in members:
            text = documents[number]["text"]
            checked += 1
            right += any(similarity(text, documents[n]["text"]) >= 0.7 for n in members if n != number)
    yield {
        "measure": "clustered documents with a true duplicate",
        "of": f"{checked:,}",
        "share": f"{right / checked:.4f}",
    }


def measure(arguments: argparse.Namespace) -> str:
    """Documents per CPU second of one process; ratios within a round."""
    documents, planted = make_documents(arguments.count, arguments.texts)
    size = sum(len(document["text"]) for document in documents) / len(documents)
    with TemporaryDirectory() as name:
        source, target = Path(name) / "in.jsonl.zst", Path(name) / "out"
        with document_writer(source) as write:
            for document in documents:
                write(document)
        works: dict[str, Callable[[], object]] = {
            "signatures: rensa": lambda: rensa_signatures(documents),
            "signatures: datasketch": lambda: datasketch_signatures(documents),
            "signatures: corpus.dedup": lambda: our_signatures(documents),
            "end to end: datasketch MinHashLSH, unverified": lambda: datasketch_dedup(source),
            "end to end: corpus.dedup run, verified": lambda: our_dedup(source, target),
        }
        if find_spec("rensa") is None:
            del works["signatures: rensa"]
        rounds = [{label: _seconds(work) for label, work in works.items()} for _ in range(arguments.rounds)]
        rows = []
        for label in works:
            peer = next(other for other in works if other.split(":")[0] == label.split(":")[0])
            rows.append(
                {
                    f"documents of {size:,.0f} characters": label,
                    "documents/s, one core": f"{len(documents) / median(r[label] for r in rounds):,.0f}",
                    "ratio": f"{median(r[peer] / r[label] for r in rounds):.2f}",
                }
            )
        return f"{table(rows)}\n\n{table(list(_found(documents, planted, target)))}"
