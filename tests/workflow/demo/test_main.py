"""The closing summary of `python -m workflow.demo`."""

from pathlib import Path

import pytest

from common.config import load_settings
from common.errors import ToolkitError
from common.files import write_json
from common.settings import Settings
from tests.conftest import ROOT
from tests.helpers import prose
from workflow.demo import __main__ as demo
from workflow.demo.__main__ import COLUMNS, LINES, summary


def stats(path: Path, seen: int, kept: int, reasons: dict[str, int], **extra: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unused = {"bytes_in": 0, "bytes_out": 0, "seconds": 1.0}
    write_json(path, {"documents_in": seen, "documents_out": kept, "reasons": reasons, **unused, **extra})


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The demo's settings, in a folder with a finished run."""
    monkeypatch.chdir(tmp_path)
    settings = load_settings(ROOT / "config.yaml")
    run = settings.run
    many = {f"reason_number_{n}": n for n in range(1, 20)}
    stats(run / "urls/stats.json", 1234, 1200, {"duplicate": 34})
    for shard in ("0000", "0001", "0002"):  # the last one is of an earlier configuration with more shards
        stats(run / f"pages/{shard}.stats.json", 600, 410, many)
        stats(run / f"clean/{shard}.stats.json", 410, 410, {})
        stats(run / f"dedup/{shard}.stats.json", 410, 400, {"near": 10})
        stats(run / f"tokens/{shard}.stats.json", 400, 400, {}, tokens=400_000)
    model = run / "models/tiny"
    write_json(model / "done.json", {"iteration": 1600, "consumed_samples": 12800})
    (model / "train.csv").write_text("iteration,ms_per_iteration\n800,50.0\n1600,100.0\n")
    (model / "valid.csv").write_text("iteration,loss,perplexity\n200,5.5,244.7\n1600,3.9,49.4\n")
    (run / "evaluation").mkdir()
    write_json(run / "evaluation/tiny.json", {"bits_per_byte": 1.8756})
    (run / "samples").mkdir()
    span = "tokens 'x': https://a-long-name.example/and-a-path, first read in iteration 78"
    sources = [f"--- sources: 1 of 90 8-grams\n8 {span}\n", f"--- sources: 9 of 90 8-grams\n12 {span}\n9 {span}\n"]
    texts = [f"--- sample 1, seed 1\n{prose(1, 400)}\n", f"--- sample 2, seed 2\n{prose(2)}\n"]
    (run / "samples/tiny.txt").write_text("".join(map("".join, zip(texts, sources, strict=True))))
    return settings


def test_the_summary_says_what_each_step_kept_and_how_the_loss_fell_on_one_screen(settings: Settings) -> None:
    lines = summary(settings).splitlines()
    assert len(lines) <= LINES - 1, "a line is left for the shell's prompt"
    assert max(map(len, lines)) <= COLUMNS
    text = " ".join(" ".join(lines).split())
    for part in (
        *("blacklist 1,234 -> 1,200 URLs dropped: 34 duplicate", "tokenize 800 -> 800 documents 800,000 tokens"),
        "scrape 1,200 -> 820 pages dropped: 38 reason_number_19, 36 reason_number_18",
        "1,600 iterations, 1,638,400 tokens in 2:00 min, 2 tensor-parallel processes",
        "5.50 after 200 iterations, 3.90 after 1600 (1.88 bits per byte)",
        " ".join(prose(1, 400).split()[:20]),
        "verbatim: 12 tokens 'x': https://a-long-name.example/and-a-path, first read in iteration 78",
        *(f"results/demo/{path}" for path in ("report.html", "merged/tiny", "dataset/corpus_text_document.bin")),
    ):
        assert part in text, part
    assert "sample 2" not in text and "8-grams" not in text
    (settings.run / "samples/tiny.txt").write_text(f"{prose(1)}\n--- sources: 0 of 90 8-grams\n")
    assert "verbatim: no 8 tokens of it stand in the training data" in summary(settings)


def test_a_failure_names_where_the_output_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SNAKEMAKE", ["sh", "-c", "exit 3"])
    with pytest.raises(ToolkitError, match=r"exit code 3.*\.snakemake/log"):
        demo.run_snakemake()
