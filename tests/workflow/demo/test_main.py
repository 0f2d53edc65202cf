"""The closing summary of `python -m workflow.demo`."""

from pathlib import Path

import pytest

from common.config import load_settings
from common.errors import ToolkitError
from tests.conftest import ROOT
from tests.helpers import prose
from tests.workflow.report.fake_run import finished_run
from workflow.demo import __main__ as demo


def test_the_summary_says_what_each_step_kept_and_how_the_loss_fell_on_one_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(ROOT / "config.yaml")
    run = finished_run(settings.run, shards=3)  # the last shard is of an earlier configuration with more
    span = f"tokens '{'x: y, ' * 9}': https://a-long-name.example/and-a-path, first read in iteration 78"
    sources = [f"--- sources: 1 of 90 8-grams\n8 {span}\n", f"--- sources: 9 of 90 8-grams\n12 {span}\n9 {span}\n"]
    texts = [f"--- sample 1, seed 1\n{prose(1, 400)}\n", f"--- sample 2, seed 2\n{prose(2)}\n"]
    (run / "samples/tiny.txt").write_text("".join(map("".join, zip(texts, sources, strict=True))))
    narrow = [line for line in demo.summary(settings, 80).splitlines() if "python -m" not in line]
    assert max(map(len, narrow)) <= 80
    assert "  https://a-long-name.example/and-a-path" in narrow
    assert [
        line for line in narrow if line.startswith("verbatim: 12") and line.endswith("…, first read in iteration 78")
    ]
    lines = demo.summary(settings).splitlines()
    assert len(lines) <= demo.LINES - 1, "a line is left for the shell's prompt"
    assert max(map(len, lines)) <= demo.COLUMNS
    text = " ".join(" ".join(lines).split())
    for part in (
        *("blacklist 300 -> 297 URLs dropped: 3 duplicate", "tokenize 170 -> 170 documents 80,000 tokens"),
        "scrape 200 -> 190 pages dropped: 6 timeout, 4 http_404",
        "400 iterations, 409,600 tokens in 0:32 min, 2 tensor-parallel ranks",
        "5.50 after 10 iterations, 4.50 after 310 (2.52 bits per byte)",
        " ".join(prose(1, 400).split()[:20]),
        "first read in iteration 78 https://a-long-name.example/and-a-path",
        *(f"results/demo/{path}" for path in ("report.html", "merged/tiny", "dataset/corpus_text_document.bin")),
    ):
        assert part in text, part
    assert "sample 2" not in text and "8-grams" not in text
    (run / "samples/tiny.txt").write_text(f"{prose(1)}\n--- sources: 0 of 90 8-grams\n")
    assert "verbatim: no 8 tokens of it stand in the training data" in demo.summary(settings)


def test_a_failure_names_where_the_output_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SNAKEMAKE", ["sh", "-c", "exit 3"])
    with pytest.raises(ToolkitError, match=r"exit code 3.*\.snakemake/log"):
        demo.run_snakemake()
