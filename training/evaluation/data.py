"""Open the data of an evaluation: datasets, text files, and the part of a dataset to evaluate. Imports no torch."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from common.console import note
from common.errors import ConfigError, InputError
from common.files import read_documents, read_lines
from common.tokenizer import Tokenizer
from corpus.index import read_meta, suffixed
from training.dataset.corpus import Corpus, split_documents


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


def choose_split(checkpoint: Path, datasets: Sequence[Path], part: str, given: str | None, trained: str | None) -> str:
    """The split that defines `part`: the `given` one (--split), or the one that the checkpoint was `trained` with.

    Prints a note if the model was trained on documents of the part. Raises InputError if neither split is known.
    """
    split = given or trained
    if split is None:
        raise InputError(
            f"{checkpoint}: does not say which documents it was trained on; for --part {part} give "
            "--split, the train.split of its training"
        )
    if trained is None or part == "train":
        return split
    for path in datasets:
        count = Corpus.open(path).documents
        documents = split_documents(split, count, path, "--split")[part]
        try:
            seen = split_documents(trained, count, path)["train"]
        except ConfigError:  # too small for that split, so not the dataset of the training
            continue
        both = range(max(documents.start, seen.start), min(documents.stop, seen.stop))
        if both:
            note(
                f"{path}: with --split {split} the model was trained on {len(both)} of the {len(documents)} documents "
                f"of --part {part}; its own split is {trained}"
            )
    return split
