"""Samples of what steps kept and dropped."""

from pathlib import Path

import orjson
import pytest

from common.files import document_writer
from tests.helpers import assert_one_line_error, called, document, prose, write_shard
from workflow.provenance.sample import main, sample


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of a run: `clean` repairs every text but document 3's, and drops German ones."""
    folder = tmp_path / "results/x"
    pages = [document(n, f"Line one\nLine {n}\x1b[31m\n{prose(n, 20)}") for n in range(100)]
    cleaned = [{**d, "text": d["text"] if n == 3 else d["text"].replace("\x1b[31m", "")} for n, d in enumerate(pages)]
    write_shard(folder / "ingest/0000.jsonl.zst", pages[:90])
    write_shard(folder / "pages/0000.jsonl.zst", pages[90:])
    write_shard(folder / "clean/0000.jsonl.zst", cleaned[:80])
    with document_writer(folder / "clean/rejects/0000.jsonl.zst", "clean") as write:
        for number in range(80, 100):
            more = {"url": "http://a.other.example/"} if number == 99 else {}
            reasons = {"reason": "language", "detail": "de"} if number % 2 else {"reason": "short"}
            write({**cleaned[number], **more, **reasons})
    return folder


def test_a_sample_depends_on_ids_and_seed_alone(run: Path, tmp_path: Path) -> None:
    everything = {"reason": "", "domain": "", "name": ""}
    shards = [run / "ingest/0000.jsonl.zst", run / "pages/0000.jsonl.zst"]

    def ids(files: list[Path], n: int, seed: int = 0) -> list[str]:
        return [found["id"] for _, found in sample(files, n, seed, **everything)]

    assert ids(shards, 20) == ids(shards[::-1], 20) and ids(shards, 7) == ids(shards, 20)[:7]
    assert len(set(ids(shards, 1000))) == 100 and ids(shards, 20) != ids(shards, 20, seed=1)
    counts = [sum(int(name, 16) < 50 for name in ids(shards, 20, seed)) for seed in range(200)]
    assert 9.5 < sum(counts) / 200 < 10.5, "uniform"


def test_documents_are_chosen_by_fate_reason_domain_and_id_and_shown_in_plain_lines(run: Path) -> None:
    clean, rejects = run / "clean", run / "clean/rejects/0000.jsonl.zst"

    def found(*arguments: object) -> list[dict[str, str]]:
        return [orjson.loads(line) for line in called(main, *arguments, "--n", "99", "--json").stdout.splitlines()]

    assert len(found(clean)) == len(found(clean / "0000.jsonl.zst", "--kept")) == 80
    assert len(found(clean, "--dropped")) == len(found(rejects)) == 20
    german = found(clean, "--reason", "language")
    assert len(german) == 10 and german == found(rejects, "--reason", "language")
    assert len(found(clean, "--reason", "language", "--domain", "other.example")) == 1
    assert found(clean, "--id", f"{3:016x}")[0]["url"] == "http://site.example/3"
    text = called(main, clean, "--reason", "language", "--domain", "a.other.example").stdout
    assert text.startswith(
        f"{99:016x}  http://a.other.example/\n  dropped by clean: language (de)\n  Line one Line 99 "
    )
    for wrong, said in (([run], "no shards"), ([clean, "--domain", "ite.example"], "no such document")):
        assert_one_line_error(called(main, *wrong), said)


def test_before_shows_what_the_step_changed_whichever_step_the_document_came_from(run: Path) -> None:
    for number, source in ((5, "http://site.example/5"), (95, "http://site.example/95")):
        step = run / "clean" if number < 80 else run / "clean/rejects/0000.jsonl.zst"
        text = called(main, step, "--id", f"{number:016x}", "--before").stdout
        assert source in text and "2 changed lines" in text and f"\n  + Line {number}\n" in text and "\x1b" not in text
    assert "unchanged: Line one" in called(main, run / "clean", "--id", f"{3:016x}", "--before").stdout
