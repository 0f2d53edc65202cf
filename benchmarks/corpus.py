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
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import corpus_peers, extract, harness, scrape, workflow
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
    """URLs per CPU second, start-up excluded."""
    with TemporaryDirectory() as name:
        source = Path(name, "urls.txt")
        with source.open("w", encoding="utf-8") as file:
            file.writelines(f"{url}\n" for url in make_urls(arguments.count))
        contenders = [
            Contender("published recipe", corpus_peers.url_recipe, (source, Path(name, "recipe.txt"))),
            Contender("corpus.blacklist", our_blacklist, (source, Path(name, "ours.txt"), 1), bar=1.2),
            Contender("corpus.blacklist, 1,000 shards", our_blacklist, (source, Path(name, "shards"), 1000)),
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
    """Documents per CPU second, and agreement with the recipe, whose second seed shows the upper limit."""
    sets = {folder.name: read_texts(folder) for folder in arguments.texts or ()} or {"packaged": packaged_texts()}
    for name, texts in sets.items():
        with TemporaryDirectory() as folder:
            documents = cut(texts, arguments.count)
            source, target = write_documents(Path(folder, "in.jsonl.zst"), documents), Path(folder, "out.jsonl.zst")
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
    from corpus.dedup.run import dedup

    return lambda: {"kept": dedup([source], target, DedupSettings()).documents_out}


def dedup(arguments: Namespace) -> Iterator[Row]:
    """Documents per CPU second of one process; then recall and precision by true Jaccard similarity."""
    documents, planted = with_copies(arguments.count)
    with TemporaryDirectory() as name:
        source, target = write_documents(Path(name, "in.jsonl.zst"), documents), Path(name, "out")
        rensa = [Contender("signatures: rensa", corpus_peers.rensa_signatures, (source,))] * bool(find_spec("rensa"))
        datasketch = Contender("signatures: datasketch", corpus_peers.datasketch_signatures, (source,))
        signatures = [*rensa, datasketch, Contender("signatures: corpus.dedup", our_signatures, (source,), bar=2.8)]
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
    """Megabytes of text per CPU second, beside bare encoders. gigatoken caches words, so give it real texts."""
    texts = chain.from_iterable(map(read_texts, arguments.texts)) if arguments.texts else packaged_texts()
    documents = cut(texts, arguments.count)
    megabytes = sum(len(document["text"].encode()) for document in documents) / 1e6
    with TemporaryDirectory() as folder:
        source = write_documents(Path(folder, "in.jsonl.zst"), documents)
        names = ("tiktoken, encode_to_numpy", "tiktoken, encode_ordinary", "gigatoken, encode", "tokenizers, encode")
        contenders = [Contender(name, corpus_peers.encoder, (name, source), cores=1) for name in names]
        ours = "corpus.tokenize, {}, end to end"
        contenders += [
            Contender(ours.format("1 worker"), our_tokenize, (1, source), cores=1, bar=4.6),
            Contender(ours.format("2 workers"), our_tokenize, (2, source), cores=2),
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
    """Seconds by the clock, because half of the work is the disk's; rows read from memory and write to disk.

    Ours checks the ids and both checksums, and like the plain copy waits for the disk; megatron-core's builder does
    neither. It runs Python's garbage collector after every shard, so another row measures it without.
    """
    shards = arguments.count
    with TemporaryDirectory(dir=arguments.folder) as name:
        inputs, output = make_shards(Path(name, "in"), shards, arguments.length), Path(name, "out")
        contenders = [
            Contender("plain copy of the .bin", corpus_peers.copy_bins, (inputs, output)),
            Contender("corpus.merge_index", our_merge, (inputs, output), bar=0.29),
        ]
        if find_spec("megatron"):
            for label, collecting in (("megatron-core, not collecting", False), ("megatron-core, add_index", True)):
                if shards < 1000 or not collecting:  # which takes a quarter of a second per shard
                    contenders.append(Contender(label, corpus_peers.megatron_merge, (inputs, output, collecting)))
        gigabytes = sum(prefix.with_suffix(".bin").stat().st_size for prefix in inputs) / 1e9
        for row in compare("merging", contenders, arguments.rounds, gigabytes, "GB"):
            yield {"shards": shards, **row}


CASES = {
    "blacklist": Case("URL rules against the published recipe", blacklist, {"count": 1_000_000, "rounds": 3}),
    "charset": Case("characters lost by encoding and declaration", extract.characters, {"texts": None}),
    "clean": Case("cleaning against ftfy and langdetect", clean, {"count": 1000, "rounds": 3, "texts": None}),
    "dedup": Case("deduplication against datasketch and rensa", dedup, {"count": 5000, "rounds": 3}),
    "extract": Case("HTML extraction against a gold standard", extract.measure, {"texts": None, "rounds": 3}),
    "merge_index": Case(
        "merging datasets against megatron-core",
        merge_index,
        {"count": 300, "length": 128, "rounds": 3, "folder": None},
    ),
    "scrape": Case("fetching and extraction against requests", scrape.measure, {"count": 8000, "rounds": 5}),
    "tokenize": Case(
        "encoding against tiktoken, gigatoken and tokenizers", tokenize, {"count": 2000, "rounds": 1, "texts": None}
    ),
    "workflow": Case("shards on Slurm against Snakemake's plugin and an array", workflow.measure, {"count": 40}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return harness.main("corpus", __doc__, CASES, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
