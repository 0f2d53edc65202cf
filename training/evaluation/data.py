"""Open the data of an evaluation: datasets and text files. Imports no torch."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from common.errors import InputError
from common.files import read_documents, read_lines
from common.tokenizer import Tokenizer
from corpus.index import read_meta, suffixed
from training.dataset.corpus import Corpus


def is_dataset(path: Path) -> bool:
    """Whether `path` is the PREFIX of a dataset."""
    return suffixed(path, ".idx").is_file()


def read_text_corpus(path: Path, tokenizer: Tokenizer) -> Corpus:
    """The documents of a text or JSON-lines file, each followed by end-of-text, as a corpus in memory."""
    if ".jsonl" in path.suffixes:
        texts: Iterable[str] = (document["text"] for document in read_documents(path))
    else:
        texts = [b"\n".join(read_lines(path)).decode("utf-8", errors="replace")]
    end = np.array([tokenizer.end_of_text], np.int64)
    documents = [np.concatenate([tokenizer.encode(text).astype(np.int64), end]) for text in texts]
    if not documents:
        raise InputError(f"{path}: no documents")
    return Corpus.in_memory(path, documents)


def dataset_vocabulary(paths: Sequence[Path]) -> int | None:
    """The vocabulary size of the first dataset that records one; None if none does."""
    metas = (read_meta(path) for path in paths if is_dataset(path))
    return next((meta.vocab_size for meta in metas if meta is not None), None)
