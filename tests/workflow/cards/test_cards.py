"""Every figure of a card equals a count over the run's documents, journal and trace."""

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml
from huggingface_hub import DatasetCard, ModelCard
from safetensors.numpy import load_file

from common.files import read_json, read_rows, read_shards, read_text
from common.page import number, size
from common.settings import SourceSettings
from common.stats import Stats
from corpus.remote.listing import Listing, write_listing
from corpus.remote.stores import Entry
from tests.conftest import Once
from tests.helpers import assert_one_line_error, called, document, prose, read_rejects, write_shard
from tests.workflow import pipeline
from training.trace import Trace

NAMES = ["README.md", "models/tiny/README.md", "models/tiny/training_content.md"]


@pytest.fixture
def run(once: Once, finished_run: Path) -> Path:
    """The finished run, with the cards that the DAG writes."""

    def build(folder: Path) -> None:
        shutil.copytree(finished_run, folder, symlinks=True, dirs_exist_ok=True)
        pipeline.finish([*pipeline.SNAKEMAKE, "cards", "--quiet", "host"], folder)

    return once("cards", build) / "results/x"


def read_card(path: Path) -> tuple[str, dict[str, str], dict[str, Any]]:
    """A card, its tables (the first cell of each row, and the others), and its front matter."""
    text = read_text(path)
    cells = re.findall(r"^\| (.*?) \| (.*) \|$", text, re.MULTILINE)
    return text, dict(cells), yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else {}


def dropped(run: Path, folder: str) -> str:
    """The reasons by count, as a card lists them, counted in the dropped documents themselves."""
    counts = Counter(found["reason"] for path in (run / folder).glob("*.zst") for found in read_rejects(path))
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items(), key=lambda x: (-x[1], x[0])))


def test_the_rule_and_the_command_write_the_same_bytes(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "x", ignore=shutil.ignore_patterns("cards", "trace", "*.safetensors"))
    assert called("workflow.cards", "--run", copy).stdout.split() == [str(copy / "cards" / name) for name in NAMES]
    for name in NAMES:
        written = read_text(run / "cards" / name)
        assert read_text(copy / "cards" / name) == written and "TO BE FILLED IN" in written
    (copy / "takedown").mkdir()
    (copy / "takedown/ids.txt").write_text(f"{'a' * 16}\n{'b' * 16}\n")
    called("workflow.cards", "--run", copy)
    counted = [read_text(copy / "cards" / name).count("the steps below had counted them: 2") for name in NAMES]
    assert counted == [1, 0, 1]
    assert called("workflow.cards", "--run", copy, "--output-dir", tmp_path, "--sme").returncode == 0
    assert "registered domains (5 %, 1,000 at most)" in read_text(tmp_path / NAMES[-1])
    (copy / "dataset/corpus_text_document.idx").unlink()
    assert_one_line_error(called("workflow.cards", "--run", copy), "corpus_text_document.idx: no such file")


def test_the_dataset_card_counts_what_the_documents_and_the_journal_say(run: Path) -> None:
    text, table, keys = read_card(run / "cards/README.md")
    final, pages = (list(read_shards(sorted(run.glob(f"{name}/*.zst")))) for name in ("dedup", "pages"))
    length, tokens = sum(len(found["text"].encode()) for found in final), np.fromfile(*run.glob("dataset/*.bin"), "u2")
    assert f"\n{len(final)} documents of text, {size(length)}; {number(len(tokens))} tokens in" in text
    assert f"`en`: {len(final)} documents, {size(length)}" in text
    lines = [orjson.loads(line) for path in run.glob("pages/*.journal") for line in path.read_bytes().splitlines()]
    days = [line["date"] for line in lines if "record" in line]
    assert len(days) == len(pages) and f"{min(days)} to {max(days)} ({len(days)} pages" in text
    urls = read_text(run.parent.parent / "site/urls.txt").splitlines()
    assert table["blacklist (URLs)"] == f"{len(urls)} | {len(lines)} | {dropped(run, 'urls/rejects')}"
    assert table["scrape (pages)"] == f"{len(lines)} | {len(pages)} | {dropped(run, 'pages/rejects')}"
    assert table["clean (documents)"].endswith(f"| {dropped(run, 'clean/rejects')}")
    assert "1 robots" in dropped(run, "pages/rejects") and "left out as `robots`: 1" in text
    assert "recorded site, site, not from the web" in text and "were not read" in text
    assert keys == DatasetCard(text).data.to_dict() and "license" not in keys
    assert (keys["language"], keys["size_categories"], keys["pretty_name"]) == (["en"], ["n<1K"], "x")


def test_the_model_card_says_what_model_data_and_evaluation_say(run: Path) -> None:
    text, table, keys = read_card(run / "cards/models/tiny/README.md")
    parameters = sum(tensor.size for tensor in load_file(run / "merged/tiny/model.safetensors").values())
    last, evaluation = read_rows(run / "models/tiny/train.csv")[-1], read_json(run / "evaluation/tiny.json")
    assert [table["iterations"], table["samples"]] == [last["iteration"], last["consumed_samples"]]
    assert [table["parameters"], table["tokens"]] == [number(parameters), number(int(last["consumed_tokens"]))]
    epoch = read_json(run / "models/tiny/plan.json")["samples_per_epoch"]
    assert table["passes over x"] == number(int(last["consumed_samples"]) / epoch)
    assert (keys["library_name"], keys["pipeline_tag"], keys["tags"]) == ("transformers", "text-generation", ["gpt2"])
    assert (keys["language"], keys["datasets"]) == (["en"], ["x"]) and "license" not in keys
    results = {each.metric_type: each.metric_value for each in ModelCard(text).data.eval_results}
    assert results == {key: evaluation[key] for key in ("loss", "perplexity", "bits_per_byte")}
    assert f"On {evaluation['documents']} documents, {number(evaluation['tokens'])} tokens" in text


def test_the_summary_names_the_domains_from_which_most_was_read_and_what_a_person_must_say(run: Path) -> None:
    text, table, _ = read_card(run / "cards/models/tiny/training_content.md")
    trace, read, seen = Trace(run / "models/tiny"), Counter[str](), set[tuple[int, int]]()
    for iteration in range(1, trace.trained + 1):
        for piece in trace.step(iteration):
            first = (iteration, piece.sample) not in seen  # its first token is no target of this sample
            seen.add((iteration, piece.sample))
            read[".".join(piece.document.url.split("/")[2].split(".")[-2:])] += piece.span.tokens - first
    (domain, tokens), *others = read.most_common()
    assert others and f"1 of {len(read)} registered domains (10 %)" in text
    assert table[domain] == number(tokens) and not any(name in table for name, _ in others)
    assert f"{number(read.total())} were read" in text
    for heading in ("1.1. Provider", "1.2. Model", "2.3. Data crawled", "2.4. User", "3.1. Respect", "3.2. Removal"):
        assert re.search(rf"^#+ {heading}[^#]*TO BE FILLED IN", text, re.MULTILINE), heading


def test_a_run_of_texts_alone_has_a_dataset_card_and_says_what_is_not_known(tmp_path: Path) -> None:
    run = tmp_path / "books"
    write_shard(run / "dedup/0000.jsonl.zst", [document(1, prose(1)), document(2, prose(2))])
    Stats("ingest", documents_in=3, documents_out=2, reasons=Counter(empty=1)).finish(run / "ingest/stats.json")
    Stats("dedup", documents_in=2, documents_out=2, bytes_out=1500).finish(run / "dedup/0000.stats.json")
    assert_one_line_error(called("workflow.cards", "--run", run), "books/config.yaml: no such file")
    config = {"run": str(run), "sources": [{"path": str(tmp_path), "name": "Old books"}]}
    (run / "config.yaml").write_bytes(orjson.dumps(config))
    assert called("workflow.cards", "--run", run).stdout.split() == [str(run / "cards/README.md")]
    text, table, keys = read_card(run / "cards/README.md")
    assert "Old books" in text and "no language was detected" in text and "2 documents of text, 1.5 kB." in text
    assert (
        "**Fetched**: not known" in text and "language" not in keys and table["ingest (documents)"] == "3 | 2 | 1 empty"
    )
    remote = SourceSettings(path="https://dumps.example/*.gz")
    (run / "config.yaml").write_bytes(orjson.dumps({**config, "sources": [*config["sources"], {"path": remote.path}]}))
    for listed in (True, False):
        if listed:
            (run / "fetch").mkdir()
            listing = Listing(remote.path, "2026-11-29", "https://dumps.example/", (Entry("a.gz"), Entry("b.gz")))
            write_listing(run / "fetch", remote, None, listing)
        else:
            shutil.rmtree(run / "fetch")
        assert called("workflow.cards", "--run", run).returncode == 0, "what was fetched may be deleted"
        text = read_card(run / "cards/README.md")[0]
        assert remote.path in text and ("2 files of https://dumps.example/, listed 2026-11-29" in text) == listed
    (run / "takedown").mkdir()
    (run / "takedown/ids.txt").write_text(f"{document(2, '')['id']}\n")
    write_shard(run / "dedup/0000.jsonl.zst", [document(1, prose(1))])  # the statistics stay
    assert called("workflow.cards", "--run", run).returncode == 0
    text = read_card(run / "cards/README.md")[0]
    assert f"1 documents of text, {size(len(prose(1).encode()))}." in text and "counted them: 1." in text
    shutil.rmtree(run / "dedup")
    assert_one_line_error(called("workflow.cards", "--run", run), "books: has no statistics of documents")
