from pathlib import Path

import pytest

from common.errors import EmptyResultError
from corpus.extract.extractors import Extracted
from corpus.runner import Step
from corpus.scrape.pages import outcome_writer, page_outcome
from corpus.scrape.response import FetchedPage
from corpus.urls.url import document_id
from tests.helpers import read_shard

PAGE = FetchedPage("https://one.example/new", 200, "OK", (), "text/html", b"zipped", b"", "http://one.example/old")


def test_a_record_is_identified_by_the_requested_url() -> None:
    record = page_outcome(PAGE, Extracted("text", "title", "2019-03-01", "trafilatura"))["record"]
    assert record == {
        "id": document_id("http://one.example/old"),
        "url": "http://one.example/old",
        "final_url": "https://one.example/new",
        "title": "title",
        "text": "text",
        "date": "2019-03-01",
        "extractor": "trafilatura",
        "content_hash": "sha1:3I42H3S6NNFQ2MSVX7XZKYAYSCX5QBYJ",  # what Common Crawl writes for an empty payload
    }
    assert "date" not in page_outcome(PAGE, Extracted("text", "", "", "plain"))["record"]


def test_outcomes_become_a_shard_rejects_and_counts(tmp_path: Path) -> None:
    output, rejects = tmp_path / "pages.jsonl", tmp_path / "rejects.jsonl"
    step = Step("scrape", (), rejects)
    stats = step.stats
    outcome = page_outcome(PAGE, Extracted("tëxt", "", "", "plain"))
    with outcome_writer(output, step) as write:
        write("http://one.example/old", outcome)
        write("http://one.example/gone", {"reason": "http_404"})
    assert read_shard(output) == [outcome["record"]]
    assert rejects.read_text() == '{"dropped_by":"scrape","url":"http://one.example/gone","reason":"http_404"}\n'
    assert (stats.documents_in, stats.documents_out, stats.bytes_out, stats.reasons) == (2, 1, 5, {"http_404": 1})
    assert stats.extra["extractors"] == {"plain": 1}


def test_a_shard_without_any_page_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(EmptyResultError, match=r"none of 1 URLs is left \(1 dns\)"):
        with outcome_writer(tmp_path / "pages.jsonl", Step("scrape", unit="URLs")) as write:
            write("http://one.example/", {"reason": "dns"})
    assert list(tmp_path.iterdir()) == []
