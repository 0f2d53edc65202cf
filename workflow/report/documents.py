"""Sample documents of a run's dataset, found through its index without reading the corpus."""

from pathlib import Path
from typing import Any

import numpy as np

from common.settings import Settings
from common.tokenizer import Tokenizer, vocabulary_files
from corpus.index import IndexedDataset, suffixed
from corpus.index.documents import DocumentTable, Row
from corpus.index.layout import DOCUMENTS

_SHARDS, _DOCUMENTS = 20, 20  # of more shards, some that are evenly spaced
_TOKENS, _CHARACTERS = 200, 500  # shown of a document: 20 * 20 * 500 characters = 200 kB


def kept_documents(run: Path, settings: Settings) -> list[tuple[str, list[dict[str, Any]]]]:
    """A shard and the beginnings of its documents with the smallest ids (hashes), if the run has a dataset."""
    prefix = run / settings.dataset_prefix.relative_to(settings.run)  # also in a run that was moved
    if not suffixed(prefix, DOCUMENTS).is_file():
        return []
    table, index = DocumentTable(prefix), IndexedDataset(prefix)
    own = [run / "tokenizer/encoder.json", run / "tokenizer/vocab.bpe"]
    given = [settings.tokenize.encoder_json, settings.tokenize.vocab_bpe]
    tokenizer = Tokenizer(vocabulary_files(*(own if own[0].is_file() else given)))
    ends = np.cumsum([documents for _, documents in table.shards])
    found = []
    for number in sorted({*np.linspace(0, len(ends) - 1, _SHARDS).astype(int).tolist()}):
        name, documents = table.shards[number]
        first = int(ends[number]) - documents
        ids = table.ids[first : first + documents]
        order = np.argsort(ids, kind="stable")
        rows = [table[first + row] for row in order[ids[order] > 0][:_DOCUMENTS].tolist()]  # 0: removed
        found.append((name, [_shown(row, index.document(row.number).tolist(), tokenizer) for row in rows]))
    return [(name, documents) for name, documents in found if documents]


def _shown(row: Row, tokens: list[int], tokenizer: Tokenizer) -> dict[str, Any]:
    text = tokenizer.decode(tokens[:_TOKENS])[:_CHARACTERS]
    return {"id": row.id, "url": row.url, "tokens": len(tokens), "text": text}
