"""Commands that only read a run: any number at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workflow.pipeline import corpus_bytes, start

MODEL, MERGED = "results/x/models/tiny", "results/x/merged/tiny"
READERS = (
    f"workflow.provenance.trace --model {MODEL} --iteration 1",
    f"workflow.provenance.trace --model {MODEL} --iteration 2 --text",
    f"training.generate --checkpoint {MERGED} --prompt The --max-tokens 3 --sources --output said.txt",
    f"training.evaluate --checkpoint {MERGED} --data results/x/dataset/corpus_text_document --output result.json",
    "workflow.report --run results/x --output report.html",
    "workflow.cards --run results/x",
    "cluster.status results/x",
)


@pytest.mark.slow
def test_readers_of_a_run_that_start_at_once_give_what_one_gives(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    subprocess.run(["cp", "-a", finished_run / "results/x", tmp_path / "results/x"], check=True)
    before, traced = corpus_bytes(tmp_path), dict[str, set[str]]()
    running = [(reader, start([sys.executable, "-m", *reader.split()], tmp_path)) for reader in READERS * 3]
    for reader, process in running:
        output, _ = process.communicate()
        assert process.returncode == 0, output
        if "provenance.trace" in reader:  # the others say how fast they were
            traced.setdefault(reader, set()).add(output)
    assert [len(outputs) for outputs in traced.values()] == [1, 1], traced
    assert corpus_bytes(tmp_path) == before
    left = [name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".tmp")]
    assert not left
    kept = [
        len(list((tmp_path / "results/x").glob(pattern))) for pattern in ("models/*/trace/*.order", "dataset/*.ngrams")
    ]
    assert all(kept)
