"""The peers of the corpus steps, each used as its users would use it. Each prepares, and returns what is timed."""

import os
import shutil
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import Timed
from common.files import Document, document_writer, fsync, read_documents
from common.settings import CleanSettings
from common.tokenizer import END_OF_TEXT, VocabularyFiles, vocabulary_files


def clean_recipe(source: Path, target: Path, seed: int) -> Timed:
    """`ftfy.fix_text` and langdetect on every text, with OpenWebText's rules; langdetect is random."""
    import ftfy
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = seed
    settings = CleanSettings()
    detect("What its profiles are loaded for.")

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
        ids = {}
        with document_writer(target) as write:
            for document in read_documents(source):
                if keeps(text := ftfy.fix_text(document["text"])):
                    write({**document, "text": text})
                    ids[document["id"]] = ""
        return {"kept": ids}

    return run


def datatrove_filter(name: str, source: Path) -> Timed:
    """A filter of datatrove; `kept`: the text of each document that it keeps, by id."""
    from datatrove.data import Document
    from datatrove.pipeline import filters

    rule = getattr(filters, name)()
    documents = [Document(text=each["text"], id=each["id"]) for each in read_documents(source)]
    rule.filter(Document(text="A first sentence loads its models.", id=""))
    return lambda: {"kept": {each.id: each.text for each in documents if rule.filter(each) is True}}


def _ngrams(text: str) -> list[str]:
    return list({text[start : start + 5] for start in range(len(text) - 4)})


def rensa_signatures(source: Path) -> Timed:
    """R-MinHash with 120 permutations over character 5-grams."""
    from rensa import RMinHash

    texts = [document["text"] for document in read_documents(source)]

    def run() -> None:
        for text in texts:
            minhash = RMinHash(num_perm=120, seed=1)
            minhash.update(_ngrams(text))
            minhash.digest()

    return run


def _minhash(document: Document) -> Any:
    from datasketch import MinHash

    minhash = MinHash(num_perm=120, seed=1)
    minhash.update_batch([shingle.encode() for shingle in _ngrams(document["text"])])
    return minhash


def datasketch_signatures(source: Path) -> Timed:
    """The same with datasketch's fastest path."""
    documents = list(read_documents(source))
    _minhash(documents[0])
    return lambda: deque(map(_minhash, documents), maxlen=0)


def datasketch_dedup(source: Path) -> Timed:
    """datasketch's recipe: MinHash and MinHashLSH with the same bands; keeps the first document, verifies nothing."""
    from datasketch import MinHashLSH

    _minhash(next(read_documents(source)))

    def run() -> None:
        index = MinHashLSH(num_perm=120, params=(20, 6))
        for document in read_documents(source):
            minhash = _minhash(document)
            if not index.query(minhash):
                index.insert(document["id"], minhash)

    return run


def encoder(name: str, source: Path) -> Timed:
    """Encode every text with one call of a library; the texts are in memory, the ids are dropped."""
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
        special = {END_OF_TEXT: 50256}
        encode = tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
        ).encode_to_numpy
    elif name.startswith("gigatoken"):
        import gigatoken

        encode = gigatoken.Tokenizer(theirs._tokenizer).encode
    texts = [document["text"].replace(END_OF_TEXT, "") for document in read_documents(source)]
    return lambda: deque(map(encode, texts), maxlen=0)


def copy_bins(inputs: list[Path], output: Path) -> Timed:
    """Concatenate the .bin files, and wait for the disk."""

    def run() -> None:
        with open(f"{output}.bin", "wb") as file:
            for prefix in inputs:
                with open(f"{prefix}.bin", "rb") as part:
                    shutil.copyfileobj(part, file, 1 << 20)
        fsync(Path(f"{output}.bin"))

    return run


def megatron_merge(inputs: list[Path], output: Path) -> Timed:
    """megatron-core: `add_index` per dataset, without its `gc.collect` after each, which takes 0.25 s; `finalize`."""
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
