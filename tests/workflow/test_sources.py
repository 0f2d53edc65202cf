"""A run of the corpus steps on existing text, without scraping."""

from pathlib import Path

import orjson

from common.tokenizer import Tokenizer
from corpus.index import IndexedDataset
from tests.helpers import prose
from tests.workflow.pipeline import DATASET, configure, finish, snakemake
from workflow.report.funnel import funnel

ITEM = "Which river did the old surveyor cross before he finally reached his camp in the northern valley"
CURE = "set format, such as text for a document per file, or leave it out with glob"
ODD = 'o\'d "q" $HOME *[x]? ü;&#~!\\b --x'


def test_existing_text_becomes_tokens_whatever_the_names_of_run_and_inputs(tmp_path: Path) -> None:
    run, texts = f"{ODD}/my run", tmp_path / "texts [y]"
    texts.mkdir()
    (texts / "one $t.txt").write_text(prose(1))
    lines = [{"text": prose(n), "url": f"https://site.example/{n}"} for n in range(2, 12)]
    (texts / "more.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    (texts / "contaminated.txt").write_text(f"{prose(90, 800)} {ITEM}. {prose(91, 800)}")
    (tmp_path / "set [z] $t.txt").write_text(ITEM)
    names = {"sources": [{"path": texts.name}], "decontaminate": {"files": ["set [z] $t.txt"]}}
    names |= {"repeats": {"units": ["lines", "paragraphs"]}}
    configure(tmp_path, run=run, shards=1, urls=[], site=None, **names)
    before = {path.name for path in tmp_path.iterdir()}
    finish(DATASET, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before | {".snakemake", ODD}, "nothing beside it"
    steps = {step.name: step.documents_out for step in funnel(tmp_path / run)}
    order = ["ingest", "clean", "dedup", "repeats", "decontaminate", "tokenize", "merge_index"]
    assert list(steps.items()) == [(step, 12) for step in order]
    dataset = IndexedDataset(tmp_path / run / "dataset/corpus_text_document")
    dataset.verify()
    text = Tokenizer().decode(dataset.tokens.tolist())
    assert all(prose(n) in text for n in range(1, 12))
    assert ITEM not in text and prose(90, 800)[:400] in text
    again = snakemake(tmp_path, "dataset", "-n")
    assert "Nothing to be done" in again.stdout + again.stderr
    (texts / "notes.md").write_text("# Notes")
    refused = snakemake(tmp_path, "dataset", "-n", "--quiet")
    assert refused.returncode == 2 and refused.stderr.endswith(f"\nerror: {texts.name}/notes.md: text; {CURE}\n")
