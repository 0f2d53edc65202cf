"""A run of the corpus half on existing text, without a scrape."""

from pathlib import Path

import orjson

from common.tokenizer import Tokenizer
from corpus.index import IndexedDataset
from report.funnel import funnel
from tests.helpers import prose
from tests.workflow.test_run import configure, run


def test_existing_text_becomes_tokens(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text(prose(1))
    lines = [{"text": prose(n), "url": f"https://site.example/{n}"} for n in range(2, 40)]
    (tmp_path / "texts" / "more.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    configure(tmp_path, urls=[], site=None, sources=[{"path": "texts"}])
    run(tmp_path)
    steps = {step.name: step for step in funnel(tmp_path / "results/x")}
    assert list(steps) == ["ingest", "clean", "dedup", "tokenize", "merge_index"]
    assert all(step.documents_out == 39 for step in steps.values())
    dataset = IndexedDataset(tmp_path / "results/x/dataset/corpus_text_document")
    dataset.verify()
    text = Tokenizer().decode(dataset.tokens.tolist())
    assert all(prose(n) in text for n in range(1, 40))
