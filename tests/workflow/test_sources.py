"""A run of the corpus steps on existing text, without scraping."""

from pathlib import Path

import orjson
import pytest
import yaml

from common.tokenizer import Tokenizer
from corpus.index import IndexedDataset
from report.funnel import funnel
from tests.helpers import prose, read_shard
from tests.workflow.test_run import configure, run

ITEM = "Which river did the old surveyor cross before he finally reached his camp in the northern valley"


def test_existing_text_becomes_tokens(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text(prose(1))
    lines = [{"text": prose(n), "url": f"https://site.example/{n}"} for n in range(2, 40)]
    (tmp_path / "texts" / "more.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    (tmp_path / "set.txt").write_text(ITEM)
    (tmp_path / "texts" / "contaminated.txt").write_text(f"{prose(90, 800)} {ITEM}. {prose(91, 800)}")
    configure(tmp_path, urls=[], site=None, sources=[{"path": "texts"}], decontaminate={"files": ["set.txt"]})
    run(tmp_path)
    steps = {step.name: step for step in funnel(tmp_path / "results/x")}
    assert list(steps) == ["ingest", "clean", "dedup", "decontaminate", "tokenize", "merge_index"]
    assert {step.name: step.documents_out for step in steps.values()} == dict.fromkeys(steps, 40)
    dataset = IndexedDataset(tmp_path / "results/x/dataset/corpus_text_document")
    dataset.verify()
    text = Tokenizer().decode(dataset.tokens.tolist())
    assert all(prose(n) in text for n in range(1, 40))
    assert ITEM not in text and prose(90, 800)[:400] in text


@pytest.mark.slow
def test_fewer_shards_read_and_leave_nothing_of_the_run_before(tmp_path: Path) -> None:
    lines = [
        {"text": f"{prose(2 * n, 300)} {ITEM}. {prose(2 * n + 1, 300)}"} for n in range(9)
    ]  # fewer than max_count, 10
    (tmp_path / "texts.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    (tmp_path / "set.txt").write_text(ITEM)
    more = {"urls": [], "site": None, "sources": [{"path": "texts.jsonl"}], "decontaminate": {"files": ["set.txt"]}}
    configure(tmp_path, **more, shards=3)
    run(tmp_path)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"shards": 1}))
    output = run(tmp_path)
    folder = tmp_path / "results/x"
    assert "files of shards from 0001 on" in output
    assert not [
        path
        for path in folder.rglob("000[12]*")
        if not path.is_relative_to(folder / "logs") and not path.is_relative_to(folder / "benchmarks")
    ]
    documents = [
        document for path in sorted(folder.glob("decontaminate/000?.jsonl.zst")) for document in read_shard(path)
    ]
    assert len(documents) == 9 and not any(ITEM in document["text"] for document in documents)
