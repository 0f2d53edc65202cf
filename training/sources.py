"""Finds the training documents that a model's text repeats: spans of 8 or more tokens.

    sources = open_sources(Path("results/demo/merged/tiny"))
    sources.of(" the list of all")["sources"]       # of a text without its prompt

A span is equal token by token and lies in one document; the answer has its URL and first iteration.
The text is encoded without its prompt, by the tokenizer of the data.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import InputError
from corpus.index import suffixed
from corpus.index.documents import DocumentTable
from corpus.index.layout import DOCUMENTS
from corpus.index.ngrams import SHORTEST, Match, longest_spans, open_ngrams
from training.dataset.corpus import Span, split_documents
from training.huggingface.config import is_pretrained_folder
from training.huggingface.origin import read_origin
from training.model_folder import is_checkpoint_name, iteration_of, newest_iteration
from training.trace import Trace


def open_sources(checkpoint: Path, model: Path = Path()) -> "Sources":
    """The training data of a checkpoint up to its iteration; `model`: the folder it was trained in.

    Default for RUN/merged/NAME: RUN/models/NAME. Raises InputError if unknown, and like `Trace`.
    """
    path, origin = Path(os.path.abspath(checkpoint)), read_origin(checkpoint)
    folder, last = path, origin.iteration if origin else None
    if is_checkpoint_name(path.name):
        folder, last = path.parent, iteration_of(path)
    elif not is_pretrained_folder(path):
        last = newest_iteration(path)
    elif not model.name:
        folder = path.parent.parent / "models" / path.name
        if path.parent.name != "merged" or not folder.is_dir():
            raise InputError(f"{checkpoint}: the folder that it was trained in is not known; name it: --sources MODEL")
    return Sources(model if model.name else folder, last)


class Sources:
    """The training data of a model up to an iteration (None: the last), and text indexes."""

    def __init__(self, model: Path, last: int | None) -> None:
        self.trace = Trace(model)
        self.last = self.trace.trained if last is None else last
        self._corpora = [samples.corpus for samples in self.trace.samples]
        self._indexes, self._tables = [], []
        for number, corpus in enumerate(self._corpora):
            prefix, other = corpus.prefix, self.trace.folder / "trace" / f"{number}.ngrams"
            beside = os.access(prefix.parent, os.W_OK)
            self._indexes.append(open_ngrams(prefix, corpus.tokens.dtype, corpus.content, None if beside else other))
            self._tables.append(DocumentTable(prefix) if suffixed(prefix, DOCUMENTS).exists() else None)

    def of(self, text: str) -> dict[str, Any]:
        """The spans of a text, longest first, and how many of its 8-grams are in the data."""
        query = self.trace.tokenizer.encode(text).astype(np.int64)
        matches = [
            match
            for number, (corpus, index) in enumerate(zip(self._corpora, self._indexes, strict=True))
            for match in index.matches(query, corpus.tokens, corpus.starts, corpus.lengths, number)
        ]
        spans = sorted(longest_spans(matches, 0, len(query)), key=lambda span: span.first - span.end)
        return {
            "eight_grams": max(0, len(query) - SHORTEST + 1),
            "verbatim": len({at for match in matches for at in range(match.first, match.end - SHORTEST + 1)}),
            "sources": [
                {"text": self.trace.tokenizer.decode(query[span.first : span.end].tolist()), **self._source(span)}
                for span in spans
            ],
        }

    def _source(self, match: Match) -> dict[str, Any]:
        """A span's tokens, its document in the data, and the iteration that read it first."""
        corpus, table = self._corpora[match.dataset], self._tables[match.dataset]
        document = int(np.searchsorted(corpus.starts, match.place, side="right")) - 1
        span = Span(document, match.place - int(corpus.starts[document]), match.end - match.first)
        parts = split_documents(self.trace.train.split, corpus.documents, corpus.prefix)
        iteration, tokens_read = self.trace.first_read(match.dataset, span, self.last)
        return {
            "at": match.first, "tokens": span.tokens, "dataset": str(corpus.prefix),
            **(table[document]._asdict() if table else {"number": document, "url": ""}),
            "first": span.first, "places": match.places,
            "part": next(name for name, documents in parts.items() if document in documents),
            "iteration": iteration or None, "tokens_read": tokens_read,
        }  # fmt: skip
