"""The whole pipeline, from URLs to generated text: the demo on a small site and a smaller model."""

import shutil
import sys
from pathlib import Path

import pytest

from common.files import read_json
from tests.workflow import pipeline

pytestmark = pytest.mark.xdist_group("finished_run")  # so that one worker waits for it, not all
DEMO = (sys.executable, "-m", "workflow.demo")


@pytest.fixture
def run(finished_run: Path) -> Path:
    return finished_run / "results/x"


def test_the_demo_ends_with_text_and_the_paths_of_its_results(finished_run: Path, run: Path) -> None:
    output = (finished_run / "stdout").read_text()
    sample, _, sources = (run / "samples/tiny.txt").read_text(encoding="utf-8").partition("\n--- sources: ")
    assert sources.startswith("0 of 0 8-grams stand in the training data"), "it has five tokens"
    assert sample.startswith("The") and " ".join(sample.split()) in " ".join(output.split())
    for name in ("report.html", "merged/tiny", "dataset/corpus_text_document.bin"):
        assert f"results/x/{name}" in output and (run / name).exists()
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page and f"{read_json(run / 'evaluation/tiny.json')['loss']:.4f}" in page


def test_two_ranks_trained_the_loss_fell_and_evaluation_is_that_of_the_last_validation(run: Path) -> None:
    manifest = read_json(run / "models/tiny/iter_0000012/manifest.json")
    assert manifest["parallel"]["tensor"] == 2 and manifest["padded_vocab_size"] == 50432
    ranks = {name.split("_")[1] for name in manifest["files"] if name.endswith(".safetensors")}
    assert ranks == {"0", "1"}, "both ranks wrote their shard"
    losses = [float(row.split(",")[4]) for row in (run / "models/tiny/train.csv").read_text().splitlines()[1:]]
    assert losses[-1] < losses[0] - 0.5
    evaluated = read_json(run / "evaluation/tiny.json")
    assert evaluated["part"] == "valid"
    assert evaluated["loss"] == pytest.approx(read_json(run / "models/tiny/done.json")["valid_loss"], rel=0.02)


def test_a_copy_of_a_finished_run_has_nothing_to_do_and_changes_no_file(finished_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished_run, tmp_path / "copy", symlinks=True)

    def times() -> dict[Path, int]:
        files = [path for path in (folder / "results").rglob("*") if path.is_file() and path.name != "lock"]
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    assert "Nothing to be done" in pipeline.finish(DEMO, folder)
    assert times() == before
