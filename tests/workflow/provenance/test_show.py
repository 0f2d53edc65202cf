"""One document through all steps of a run."""

import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from common.errors import InputError
from common.settings import Settings
from common.tokenizer import Tokenizer
from common.vocabulary import vocabulary_files
from corpus.index import IndexedDataset
from corpus.ingest import ingest
from tests.helpers import called, prose, read_shard
from workflow.provenance import show as module
from workflow.provenance.sample import read_any
from workflow.runs import load_run


@pytest.fixture
def shown(finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> "Show":
    monkeypatch.chdir(finished_run)
    return Show(Path("results/x"))


class Show:
    def __init__(self, run: Path) -> None:
        self.run, self.settings = run, load_run(run)

    def __call__(self, wanted: str) -> str:
        return "\n".join(module.show(self.settings, wanted))


def test_the_tokens_of_every_document_are_its_text(shown: Show) -> None:
    tokenizer = Tokenizer(vocabulary_files())
    dataset = IndexedDataset(shown.run / "dataset/corpus_text_document")
    kept = 0
    for shard in sorted((shown.run / "dedup").glob("*.jsonl.zst")):
        for document in read_shard(shard):
            text = shown(document["id"])
            spans = re.findall(r"document ([\d,]+), tokens ([\d,]+) to ([\d,]+)", text)
            if not spans:
                assert re.search(r"^tokenize +dropped by tokenize: short \(\d+ tokens\)$", text, re.MULTILINE)
                continue
            number, first, last = (int(figure.replace(",", "")) for figure in spans[-1])
            assert number == kept and "decoded, they are the text" in text and "DIFFER" not in text
            assert tokenizer.decode(dataset.tokens[first:last].tolist()) == document["text"]
            kept += 1
    assert kept == dataset.n_documents


def test_documents_that_tokenize_drops_have_no_place_among_the_tokens(shown: Show, tmp_path: Path) -> None:
    shutil.copytree(shown.run, tmp_path / "x", ignore=shutil.ignore_patterns("models", "merged", "dataset"))
    shard, tokens = tmp_path / "x/dedup/0000.jsonl.zst", tmp_path / "x/tokens"
    documents = read_shard(shard)
    lengths = sorted(IndexedDataset(tokens / "0000_text_document").lengths.tolist())
    least = f"tokenize.min_tokens={lengths[len(lengths) // 2]}"
    outputs = ("--output-prefix", tokens / "0000", "--rejects", tokens / "rejects/0000.jsonl.zst")
    assert called("corpus.tokenize", "--input", shard, *outputs, least).returncode == 0
    texts = [Show(tmp_path / "x")(document["id"]) for document in documents]
    dropped = ["dropped by tokenize" in text for text in texts]
    assert False in dropped[dropped.index(True) :], "one is kept after one that is dropped"
    assert [("decoded, they are the text" in text) for text in texts] == [not drop for drop in dropped]


def test_every_dropped_document_and_url_ends_with_its_reason_and_a_url_reads_one_shard_per_step(
    shown: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, folder in (("scrape", "pages/rejects"), ("clean", "clean/rejects"), ("dedup", "dedup/removed")):
        for path in sorted((shown.run / folder).glob("*.jsonl.zst")):
            for document in read_any(path):
                if document["reason"] != "duplicate":  # the URL is kept, too
                    opened: list[Path] = []
                    monkeypatch.setattr(module, "read_any", lambda p, o=opened: o.append(p) or read_any(p))
                    text = shown(document["url"])
                    assert re.search(rf"^{step} +dropped by {step}: {document['reason']}", text, re.MULTILINE)
                    assert {p.name for p in opened} <= {path.name, "all.jsonl.zst"}
                    assert document.get("survivor", "") in text
                    if step == "dedup":
                        assert f"similarity {document['similarity']:.2f}" in text


def test_a_prefix_is_enough_and_what_is_missing_is_named(shown: Show, tmp_path: Path) -> None:
    document = read_shard(shown.run / "dedup/0001.jsonl.zst")[0]
    assert shown(document["id"][:9]) == shown(document["id"]) == shown(document["url"])
    for wanted, said in (
        ("f" * 16, "has this id"),
        ("http://no.example/x", "has this URL"),
        ("http://[x/", "not a URL"),
        ("no/a.txt", "has this file"),
    ):
        with pytest.raises(InputError, match=said):
            shown(wanted)
    shutil.copytree(shown.run, tmp_path / "x", ignore=shutil.ignore_patterns("models", "merged", "*.warc.gz"))
    os.remove(tmp_path / "x/tokens/0001_text_document.idx")
    assert "not done yet; last seen in dedup/0001.jsonl.zst" in Show(tmp_path / "x")(document["id"])
    os.remove(tmp_path / "x/dedup/0001.jsonl.zst")
    assert "not done yet; last seen in clean/0001.jsonl.zst" in Show(tmp_path / "x")(document["id"])


def test_own_text_is_found_by_its_file_also_if_another_has_the_same_text(tmp_path: Path) -> None:
    texts = {"a.txt": prose(1, 90), "b.txt": prose(1, 90), "more/b.txt": prose(2, 90)}
    for name, text in texts.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    run = tmp_path / "x"
    settings = Settings.model_validate({"run": run, "sources": [{"path": f"{tmp_path}/texts"}], "shards": 2})
    shards = [run / f"ingest/000{shard}.jsonl.zst" for shard in range(2)]
    ingest(settings.sources, shards)
    show = partial(module.show, settings)
    found = {name: "\n".join(show(f"texts/{name}")) for name in texts}
    for name, text in found.items():
        assert f"ingest         kept; document {int(name == 'b.txt')} of " in text or name == "more/b.txt"
        assert f"origin: {tmp_path}/texts/{name}:1" in text
    assert found["a.txt"][:16] == found["b.txt"][:16] != found["more/b.txt"][:16]
    assert "\n".join(show("more/b.txt:1")) == "\n".join(show(found["more/b.txt"][:9])) == found["more/b.txt"]
    assert (
        f"{found['a.txt'][:16]}  {tmp_path}/texts/a.txt:1\n"
        in called("workflow.provenance.sample", run / "ingest").stdout
    )
