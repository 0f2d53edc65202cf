"""Benchmarks of the corpus steps.

    python -m benchmarks.corpus clean
    python -m benchmarks.corpus extract --texts ../article-extraction-benchmark

Each prints tables for docs/benchmarks.md; a ratio is the speed relative to a peer in the same run.
"""

import os
import shutil
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import documentation, duplicates, extract, harness, language
from benchmarks.harness import Case, Row, Timed, compare
from benchmarks.inputs import cut, read_texts, write_documents
from common import cli
from common.files import document_writer, fsync, read_documents
from common.settings import CleanSettings, TokenizeSettings
from common.vocabulary import END_OF_TEXT, VocabularyFiles, vocabulary_files


def clean_recipe(source: Path, target: Path, seed: int) -> Timed:
    """`ftfy.fix_text`, langdetect with this seed, and OpenWebText's rules."""
    import ftfy
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = seed
    settings = CleanSettings()
    detect("This loads its profiles.")

    def keeps(text: str) -> bool:
        if len(text) < settings.min_characters:
            return False
        if len(text) < settings.javascript_characters and "javascript" in text.lower():
            return False
        try:
            return bool(detect(text) == settings.language)
        except LangDetectException:
            return False

    def run() -> dict[str, Any]:
        ids = set()
        with document_writer(target) as write:
            for document in read_documents(source):
                if keeps(text := ftfy.fix_text(document["text"])):
                    write({**document, "text": text})
                    ids.add(document["id"])
        return {"kept": ids}

    return run


def our_clean(source: Path, target: Path) -> Timed:
    """`corpus.clean` with one worker."""
    from corpus.clean import clean

    odd = {"id": "0" * 16, "text": "é 1234 " * 100}
    few = write_documents(source.with_name("few.jsonl.zst"), [*islice(read_documents(source), 20), odd])
    clean([few], target, CleanSettings(), workers=1, allow_empty=True)  # loads the language profiles

    def run() -> dict[str, Any]:
        clean([source], target, CleanSettings(), workers=1, allow_empty=True)
        return {"kept": {document["id"] for document in read_documents(target)}}

    return run


def clean(arguments: Namespace) -> Iterator[Row]:
    """Cleaning against ftfy and langdetect; agreement with them, theirs with another seed."""
    for folders in [[folder] for folder in arguments.texts or ()] or [[]]:
        documents = cut(read_texts(folders), arguments.count)
        source, target = write_documents(arguments.work / "in.jsonl.zst", documents), arguments.work / "out.jsonl.zst"
        contenders = {
            "plain recipe": partial(clean_recipe, source, target, 0),
            "plain recipe, another seed": partial(clean_recipe, source, target, 1),
            "corpus.clean": partial(our_clean, source, target),
        }
        rows = compare("cleaning", contenders, arguments.rounds, len(documents), "documents", clock="cpu")
        for row in rows:
            alike = 1 - len(row["kept"] ^ rows[0]["kept"]) / len(documents)
            name = folders[0].name if folders else "packaged"
            yield {"texts": name, **row, "kept": len(row["kept"]), "decided alike %": 100 * alike}


def encoder(name: str, source: Path) -> Timed:
    """Encode every text, already in memory, with one call of a library; the ids are dropped."""
    from tokenizers import ByteLevelBPETokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    files = vocabulary_files()
    assert isinstance(files, VocabularyFiles)
    theirs: Any = ByteLevelBPETokenizer(str(files.encoder_json), str(files.vocab_bpe))
    encode = theirs.encode
    if name.startswith("tiktoken"):
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        from tiktoken_ext.openai_public import r50k_pat_str

        os.environ["TIKTOKEN_CACHE_DIR"] = ""  # it would copy the files to /tmp
        ranks = data_gym_to_mergeable_bpe_ranks(str(files.vocab_bpe), str(files.encoder_json))
        encoding = tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50256}
        )
        encode = encoding.encode_to_numpy
    elif name.startswith("gigatoken"):
        import gigatoken

        encode = gigatoken.Tokenizer(theirs._tokenizer).encode
    texts = [document["text"].replace(END_OF_TEXT, "") for document in read_documents(source)]
    return lambda: deque(map(encode, texts), maxlen=0)


def our_tokenize(source: Path) -> Timed:
    """`corpus.tokenize` with one worker, from a compressed shard to a dataset."""
    from corpus.tokenize import tokenize

    one = write_documents(source.with_name("one.jsonl.zst"), [next(read_documents(source))])
    tokenize([one], source.with_name("one"), TokenizeSettings(), allow_empty=True)
    return lambda: tokenize([source], source.with_name("out"), TokenizeSettings(), workers=1)


def tokenize(arguments: Namespace) -> Iterator[Row]:
    """Encoding against bare encoders. gigatoken caches words, so give it real texts."""
    documents = cut(read_texts(arguments.texts or ()), arguments.count)
    megabytes = sum(len(document["text"].encode()) for document in documents) / 1e6
    source = write_documents(arguments.work / "in.jsonl.zst", documents)
    names = ("tiktoken, encode_to_numpy", "gigatoken, encode", "tokenizers, encode")
    contenders = {name: partial(encoder, name, source) for name in names}
    contenders["corpus.tokenize, end to end"] = partial(our_tokenize, source)
    yield from compare("encoding", contenders, arguments.rounds, megabytes, "MB", clock="cpu")


def make_shards(folder: Path, shards: int, tokens: int) -> list[Path]:
    """Shards of 1,000 documents of random ids; after a hundred, they are hard links to these."""
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


def copy_bins(inputs: list[Path], output: Path) -> Timed:
    """Concatenate the .bin files, and fsync."""

    def run() -> None:
        with open(f"{output}.bin", "wb") as file:
            for prefix in inputs:
                with open(f"{prefix}.bin", "rb") as part:
                    shutil.copyfileobj(part, file, 1 << 20)
        fsync(Path(f"{output}.bin"))

    return run


def megatron_merge(inputs: list[Path], output: Path) -> Timed:
    """megatron-core, without the `gc.collect` of .25 s after each dataset."""
    import warnings

    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def run() -> None:
        builder = IndexedDatasetBuilder(f"{output}.bin", dtype=np.uint16)
        with patch("gc.collect"):
            for prefix in inputs:
                builder.add_index(str(prefix))
        builder.finalize(f"{output}.idx")

    return run


def our_merge(inputs: list[Path], output: Path) -> Timed:
    """`corpus.merge_index`."""
    from corpus.merge_index import merge_index

    return lambda: merge_index(inputs, output)


def merge_index(arguments: Namespace) -> Iterator[Row]:
    """Merging datasets against megatron-core: reads from memory, writes to disk.

    Ours checks ids and checksums and calls fsync, as the plain copy does; megatron-core does
    neither.
    """
    shards, output = arguments.count, arguments.work / "out"
    inputs = make_shards(arguments.work / "in", shards, arguments.length)
    contenders = {
        "plain copy of the .bin": partial(copy_bins, inputs, output),
        "corpus.merge_index": partial(our_merge, inputs, output),
    }
    if find_spec("megatron"):
        contenders["megatron-core, add_index"] = partial(megatron_merge, inputs, output)
    gigabytes = sum(prefix.with_suffix(".bin").stat().st_size for prefix in inputs) / 1e9
    for row in compare("merging", contenders, arguments.rounds, gigabytes, "GB"):
        yield {"shards": shards, **row}


CASES: dict[str, Case] = {
    "clean": (clean, {"count": 1000, "rounds": 3, "texts": None}),
    "datatrove": (duplicates.datatrove, {"count": 60_000, "peer": Path("datatrove")}),
    "recall": (duplicates.recall, {"count": 80_000}),
    "dedup": (duplicates.dedup, {"count": 5000, "rounds": 3}),
    "documentation": (documentation.measure, {"texts": None, "count": 40}),
    "extract": (extract.measure, {"texts": None, "rounds": 3}),
    "language": (language.measure, {"texts": None, "count": 40}),
    "merge_index": (merge_index, {"count": 300, "length": 128, "rounds": 3}),
    "tokenize": (tokenize, {"count": 2000, "rounds": 1, "texts": None}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return harness.main("corpus", __doc__, CASES, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
