"""Benchmarks of the corpus steps.

    python -m benchmarks.corpus blacklist
    python -m benchmarks.corpus extract --texts ../article-extraction-benchmark
    python -m benchmarks.corpus scrape

Each prints tables for docs/benchmarks.md; a ratio is the speed relative to a peer in the same run.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import corpus_peers, extract, harness, scrape
from benchmarks.harness import Case, Contender, Row, Timed, compare
from benchmarks.inputs import cut, make_urls, packaged_texts, read_texts, with_copies, write_documents
from common import cli
from common.files import Document, read_documents, read_json_lines, shard_paths
from common.settings import BlacklistSettings, CleanSettings, DedupSettings, TokenizeSettings

# ------------------------------------------------------------------------------------------------ URL rules


def our_blacklist(source: Path, target: Path, shards: int) -> Timed:
    """`corpus.blacklist` into one file, or into a folder of shards."""
    from corpus.blacklist import blacklist

    outputs = [target] if shards == 1 else shard_paths(target, shards, ".txt")
    one = source.with_name("one.txt")
    one.write_text("http://example.org/\n")
    blacklist([one], outputs, BlacklistSettings())  # imports modules and reads lists
    return lambda: {"kept": blacklist([source], outputs, BlacklistSettings()).documents_out}


def blacklist(arguments: Namespace) -> Iterator[Row]:
    """URL rules beside the published recipe: URLs per CPU second, start-up excluded."""
    source, work = arguments.work / "urls.txt", arguments.work
    with source.open("w", encoding="utf-8") as file:
        file.writelines(f"{url}\n" for url in make_urls(arguments.count))
    contenders = [
        Contender("published recipe", corpus_peers.url_recipe, (source, work / "recipe.txt")),
        Contender("corpus.blacklist", our_blacklist, (source, work / "ours.txt", 1), bar=1.2),
        Contender("corpus.blacklist, 1,000 shards", our_blacklist, (source, work / "shards", 1000)),
    ]
    yield from compare("URL rules", contenders, arguments.rounds, arguments.count, "URLs", clock="cpu")


# ------------------------------------------------------------------------------------------------ cleaning


def our_clean(source: Path, target: Path) -> Timed:
    """`corpus.clean` with one worker."""
    from corpus.clean import clean

    texts = [*[document["text"] for document in read_documents(source)][:20], "é 1234 " * 100]
    few = ({"id": f"{n:016x}", "text": text} for n, text in enumerate(texts))
    one = write_documents(source.with_name("one.jsonl.zst"), few)
    clean([one], target, CleanSettings(), workers=1, allow_empty=True)  # loads the language profiles

    def run() -> dict[str, Any]:
        clean([source], target, CleanSettings(), workers=1, allow_empty=True)
        return {"kept": {document["id"] for document in read_documents(target)}}

    return run


def clean(arguments: Namespace) -> Iterator[Row]:
    """Cleaning beside ftfy and langdetect, and agreement with them, whose second seed shows the upper limit."""
    sets = {folder.name: read_texts(folder) for folder in arguments.texts or ()} or {"packaged": packaged_texts()}
    for name, texts in sets.items():
        documents = cut(texts, arguments.count)
        source, target = write_documents(arguments.work / "in.jsonl.zst", documents), arguments.work / "out.jsonl.zst"
        contenders = [
            Contender("plain recipe", corpus_peers.clean_recipe, (source, target, 0)),
            Contender("plain recipe, another seed", corpus_peers.clean_recipe, (source, target, 1)),
            Contender("corpus.clean", our_clean, (source, target), bar=9),
        ]
        rows = compare("cleaning", contenders, arguments.rounds, len(documents), "documents", clock="cpu")
        for row in rows:
            alike = 1 - len(row["kept"] ^ rows[0]["kept"]) / len(documents)
            yield {"texts": name, **row, "kept": len(row["kept"]), "decided alike %": 100 * alike}


# ------------------------------------------------------------------------------------------------ deduplication


def our_signatures(source: Path) -> Timed:
    """MinHash with 120 permutations over character 5-grams."""
    from corpus.dedup.shingles import MinHasher

    texts = [document["text"] for document in read_documents(source)]
    hasher = MinHasher(DedupSettings())

    def run() -> None:
        for text in texts:
            hasher.signature(text)

    return run


def our_dedup(source: Path, target: Path) -> Timed:
    """`corpus.dedup run`, with reading, signatures, verification and writing."""
    from corpus.dedup.__main__ import dedup

    few = list(read_documents(source))[:20]
    one = write_documents(source.with_name("few.jsonl.zst"), few)
    dedup([one], target.with_name("warm"), DedupSettings())  # imports modules
    return lambda: {"kept": dedup([source], target, DedupSettings()).documents_out}


def dedup(arguments: Namespace) -> Iterator[Row]:
    """Deduplication beside datasketch and rensa; then recall and precision by true Jaccard similarity."""
    documents, planted = with_copies(arguments.count)
    source, target = write_documents(arguments.work / "in.jsonl.zst", documents), arguments.work / "out"
    signatures = [
        Contender("signatures: datasketch", corpus_peers.datasketch_signatures, (source,)),
        Contender("signatures: corpus.dedup", our_signatures, (source,), bar=2.8),
    ]
    if find_spec("rensa"):
        signatures.insert(0, Contender("signatures: rensa", corpus_peers.rensa_signatures, (source,)))
    whole = [
        Contender("end to end: datasketch MinHashLSH, unverified", corpus_peers.datasketch_dedup, (source,)),
        Contender("end to end: corpus.dedup run, verified", our_dedup, (source, target), bar=6.0),
    ]
    for contenders in (signatures, whole):
        rows = compare("deduplication", contenders, arguments.rounds, len(documents), "documents", clock="cpu")
        yield from ({**row, "kept": row.get("kept")} for row in rows)
    yield from _recall(documents, planted, target)


def _recall(documents: list[Document], planted: list[tuple[int, int]], target: Path) -> Iterator[Row]:
    """Planted pairs that share a cluster; and members of clusters that truly resemble another member."""
    import orjson

    def similarity(one: int, other: int) -> float:
        texts = documents[one]["text"], documents[other]["text"]
        a, b = ({text[start : start + 5] for start in range(len(text) - 4)} for text in texts)
        return len(a & b) / len(a | b)

    removed = chain.from_iterable(map(read_json_lines, (target / "removed").glob("*")))
    survivor = {one["id"]: one["survivor"] for one in map(orjson.loads, removed)}
    of = [str(survivor.get(document["id"], document["id"])) for document in documents]
    for least in (0.7, 0.8):
        pairs = [pair for pair in planted if similarity(*pair) >= least]
        share = sum(of[one] == of[other] for one, other in pairs) / len(pairs)
        yield {"measure": f"pairs at Jaccard >= {least}", "of": len(pairs), "share": share}
    clusters: dict[str, list[int]] = {}
    for number, name in enumerate(of):
        clusters.setdefault(name, []).append(number)
    checked = [cluster for cluster in clusters.values() if len(cluster) > 1][:300]
    right = [any(similarity(n, m) >= 0.7 for m in cluster if m != n) for cluster in checked for n in cluster]
    yield {"measure": "clustered documents with a true duplicate", "of": len(right), "share": sum(right) / len(right)}


# ------------------------------------------------------------------------------------------------ tokens and datasets


def our_tokenize(workers: int, source: Path) -> Timed:
    """`corpus.tokenize`: loads its vocabulary, reads, decompresses, parses, encodes, filters and writes."""
    from corpus.tokenize import tokenize

    one = write_documents(source.with_name("one.jsonl.zst"), [next(read_documents(source))])
    tokenize([one], source.with_name("one"), TokenizeSettings(), allow_empty=True)
    return lambda: tokenize([source], source.with_name("out"), TokenizeSettings(), workers=workers)


def tokenize(arguments: Namespace) -> Iterator[Row]:
    """Encoding beside bare encoders. gigatoken caches words, so give it real texts."""
    texts = chain.from_iterable(map(read_texts, arguments.texts)) if arguments.texts else packaged_texts()
    documents = cut(texts, arguments.count)
    megabytes = sum(len(document["text"].encode()) for document in documents) / 1e6
    source = write_documents(arguments.work / "in.jsonl.zst", documents)
    names = ("tiktoken, encode_to_numpy", "tiktoken, encode_ordinary", "gigatoken, encode", "tokenizers, encode")
    contenders = [Contender(name, corpus_peers.encoder, (name, source)) for name in names]
    contenders += [
        Contender("corpus.tokenize, 1 worker, end to end", our_tokenize, (1, source), bar=4.6),
        Contender("corpus.tokenize, 2 workers, end to end", our_tokenize, (2, source)),
    ]
    yield from compare("encoding", contenders, arguments.rounds, megabytes, "MB", clock="cpu")


def make_shards(folder: Path, shards: int, tokens: int) -> list[Path]:
    """Shards of 1,000 documents of random ids: a hundred are written, the others are hard links to them."""
    import numpy as np

    from corpus.index import IndexWriter, Meta, suffixed

    random = np.random.default_rng(1)
    prefixes = [folder / f"{number:05d}" for number in range(shards)]
    for number, prefix in enumerate(prefixes):
        if number >= 100:
            for suffix in (".bin", ".idx", ".json"):
                os.link(suffixed(prefixes[number % 100], suffix), suffixed(prefix, suffix))
            continue
        lengths = random.integers(1, 2 * tokens, 1000)
        with IndexWriter(prefix, np.uint16, Meta(50257, 50256)) as index:
            index.add_documents(random.integers(0, 50257, lengths.sum()), lengths)
    return prefixes


def our_merge(inputs: list[Path], output: Path) -> Timed:
    """`corpus.merge_index`."""
    from corpus.merge_index import merge_index

    return lambda: merge_index(inputs, output)


def merge_index(arguments: Namespace) -> Iterator[Row]:
    """Merging datasets beside megatron-core, by the clock; rows read from memory and write to disk.

    Ours checks the ids and both checksums, and like the plain copy waits for the disk; megatron-core's builder does
    neither. It runs Python's garbage collector after every shard, so another row measures it without.
    """
    shards, output = arguments.count, arguments.work / "out"
    inputs = make_shards(arguments.work / "in", shards, arguments.length)
    contenders = [
        Contender("plain copy of the .bin", corpus_peers.copy_bins, (inputs, output)),
        Contender("corpus.merge_index", our_merge, (inputs, output), bar=0.29),
    ]
    if find_spec("megatron"):
        for label, collecting in (("megatron-core, not collecting", False), ("megatron-core, add_index", True)):
            if shards < 1000 or not collecting:  # 0.25 s per shard
                contenders.append(Contender(label, corpus_peers.megatron_merge, (inputs, output, collecting)))
    gigabytes = sum(prefix.with_suffix(".bin").stat().st_size for prefix in inputs) / 1e9
    for row in compare("merging", contenders, arguments.rounds, gigabytes, "GB"):
        yield {"shards": shards, **row}


CASES: dict[str, Case] = {
    "blacklist": (blacklist, {"count": 1_000_000, "rounds": 3}),
    "charset": (extract.characters, {"texts": None}),
    "clean": (clean, {"count": 1000, "rounds": 3, "texts": None}),
    "dedup": (dedup, {"count": 5000, "rounds": 3}),
    "extract": (extract.measure, {"texts": None, "rounds": 3}),
    "merge_index": (merge_index, {"count": 300, "length": 128, "rounds": 3, "folder": None}),
    "scrape": (scrape.measure, {"count": 8000, "rounds": 5}),
    "tokenize": (tokenize, {"count": 2000, "rounds": 1, "texts": None}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return harness.main("corpus", __doc__, CASES, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
