"""The corpus steps on 181 real news and blog pages, served under their own host names."""

from pathlib import Path

import pytest

from corpus.index import IndexedDataset
from report.funnel import funnel
from tests.real_site import write_real_site
from tests.workflow.pipeline import configure, make_corpus


@pytest.mark.slow
def test_real_pages_become_a_corpus_and_every_lost_one_has_a_reason(tmp_path: Path, shared_data: Path) -> None:
    assert write_real_site(shared_data, tmp_path / "site") == 181
    configure(tmp_path, shards=4, scrape={"host_delay": 0})
    make_corpus(tmp_path)
    steps = {step.name: step for step in funnel(tmp_path / "results/x")}
    for step in steps.values():
        assert step.documents_in == step.documents_out + sum(count for _, count in step.reasons)
    assert steps["blacklist"].documents_in == 181
    assert steps["blacklist"].documents_out >= 178
    assert steps["scrape"].documents_out >= 0.98 * steps["scrape"].documents_in
    # about twenty of the pages are not in English
    assert dict(steps["clean"].reasons)["language"] <= 25
    assert steps["merge_index"].documents_out >= 145
    dataset = IndexedDataset(tmp_path / "results/x/dataset/corpus_text_document")
    dataset.verify()
    assert len(dataset.tokens) > 130_000
