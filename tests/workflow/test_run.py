"""Whole runs of the corpus steps: no kill and no number of workers or shards changes a byte."""

import random
import time
from itertools import pairwise
from pathlib import Path

import pytest

from common.tokenizer import Tokenizer
from corpus.index import IndexedDataset
from tests.helpers import read_shard
from tests.workflow import pipeline
from tests.workflow.pipeline import CHAPTERS, DATASET, configure, corpus_bytes, kill_tree, paragraphs
from workflow.report.funnel import funnel


def test_every_chapter_is_in_the_corpus_and_no_navigation_or_mojibake(finished_run: Path) -> None:
    dataset = IndexedDataset(finished_run / "results/x/dataset/corpus_text_document")
    dataset.verify()
    documents = [d for path in (finished_run / "results/x/dedup").glob("*.zst") for d in read_shard(path)]
    assert dataset.n_documents == len(documents) == CHAPTERS + 5, "each chapter once, and five of the odd pages"
    text = " ".join(Tokenizer().decode(dataset.tokens.tolist()).split())
    for number in range(CHAPTERS):
        # of some chapters, the slightly edited copy survives
        assert sum(paragraph[:80] in text for paragraph in paragraphs(number)) >= 4, number
    assert "Ã" not in text and "Privacy" not in text
    assert "café’s résumé" in text or "café's résumé" in text, "repaired"


def test_every_odd_page_meets_its_rule_and_no_document_is_lost_between_steps(finished_run: Path) -> None:
    steps = funnel(finished_run / "results/x")
    assert {step.name: dict(step.reasons) for step in steps} == {
        "blacklist": {"duplicate": 3, "malformed": 3, "private_host": 2, "domain": 1, "extension": 1, "scheme": 1},
        "scrape": dict.fromkeys(
            (
                *("content_type", "extract_empty", "http_404", "http_503"),
                *("redirect_loop", "redirect_refused", "robots", "timeout"),
            ),
            1,
        ),
        "clean": {"language": 1, "short": 1},
        "dedup": {"near": 16},
        "tokenize": {},
        "merge_index": {},
    }
    assert steps[0].documents_in == CHAPTERS + 16 + 26
    for step in steps:
        assert step.documents_in == step.documents_out + sum(count for _, count in step.reasons)
    for earlier, later in pairwise(steps):
        assert later.documents_in == earlier.documents_out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_neither_a_kill_at_any_moment_nor_the_number_of_workers_changes_a_byte(
    finished_run: Path, tmp_path: Path, seed: int
) -> None:
    end = time.monotonic() + random.Random(seed).uniform(0.5, 10)
    (tmp_path / "site").symlink_to(finished_run / "site")
    configure(tmp_path)
    process = pipeline.start(DATASET, tmp_path)
    while time.monotonic() < end and process.poll() is None:
        time.sleep(0.01)
    if process.poll() is None:  # it may have ended before the moment
        kill_tree(process)
    pipeline.finish([*DATASET, "--cores", str(1 + seed % 2)], tmp_path)
    assert corpus_bytes(tmp_path) == corpus_bytes(finished_run) and len(corpus_bytes(tmp_path)) == 24
    assert not list((tmp_path / "results").rglob("*.tmp"))


@pytest.mark.slow
def test_the_number_of_shards_changes_no_survivor(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "site").symlink_to(finished_run / "site")
    configure(tmp_path, shards=1)
    pipeline.finish([*pipeline.SNAKEMAKE, "corpus"], tmp_path)
    ours, theirs = (
        sorted(document["id"] for path in (run / "results/x/dedup").glob("*.zst") for document in read_shard(path))
        for run in (tmp_path, finished_run)
    )
    assert ours == theirs and len(ours) > CHAPTERS
