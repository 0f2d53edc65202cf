"""The whole pipeline, from URLs to generated text: `python -m demo` on a small site and a smaller model."""

import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.files import read_json
from demo.build import build_site
from tests.helpers import prose
from tests.workflow.test_run import configure, kill_tree
from training.inference.load import load_model

TINY = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 32, "dropout": 0.1},
    "parallel": {"tensor": 2},
    "train": {
        "iterations": 12, "micro_batch_size": 4, "global_batch_size": 4, "lr": 0.01, "warmup": 0.1, "split": "80,20,0",
        "log_interval": 4, "eval_interval": 4, "save_interval": 4,
    },
}  # fmt: skip


def lay_out(folder: Path, site: Path) -> None:
    (folder / "site").symlink_to(site)
    configure(folder, train_models=["tiny"], models={"tiny": TINY}, generate={"prompt": "The", "max_tokens": 5})


def start(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "demo"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(folder: Path) -> str:
    process = start(folder)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site({f"Chapter {n}": "\n\n".join(prose(10 * n + p, 83) for p in range(6)) for n in range(12)}, folder)
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, site: Path) -> tuple[Path, str]:
    """A finished run and its output."""
    folder = tmp_path_factory.mktemp("done")
    lay_out(folder, site)
    return folder / "results" / "x", finish(folder)


def test_the_demo_ends_with_text_and_the_places_of_its_results(done: tuple[Path, str]) -> None:
    run, output = done
    assert "tiny continues 'The'" in output
    sample = (run / "samples" / "tiny.txt").read_text(encoding="utf-8")
    assert sample.startswith("The") and " ".join(sample.split()) in " ".join(output.split())
    for place in ("merged/tiny", "dataset/corpus_text_document", "report.html"):
        assert f"results/x/{place}" in output
    assert "loss on held-out documents" in output and "Finished jobid" not in output
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page and "perplexity" in page


def test_the_report_of_snakemake_has_captions_and_categories(done: tuple[Path, str]) -> None:
    run, _ = done
    folder = run.parent.parent
    command = [sys.executable, "-m", "snakemake", "--report", "run.zip", "all"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    with zipfile.ZipFile(folder / "run.zip") as parts:
        names = {name.rpartition("/")[2] for name in parts.namelist()}
        page = parts.read("run/report.html").decode()
    assert {"report.html", "done.json", "tiny.json", "tiny.txt", "clusters.json", "stats.json"} <= names
    for text in ("Overview", "Corpus", "Models", "Where the training of", "clusters of duplicates"):
        assert text in page, text


def test_two_ranks_trained_and_the_loss_fell(done: tuple[Path, str]) -> None:
    run, _ = done
    manifest = read_json(run / "models/tiny/iter_0000012/manifest.json")
    assert manifest["parallel"]["tensor"] == 2 and manifest["padded_vocab_size"] == 50432
    ranks = {name.split("_")[2] for name in manifest["files"] if name.endswith(".distcp")}
    assert ranks == {"0", "1"}, "both ranks wrote their shard"
    losses = [float(row.split(",")[4]) for row in (run / "models/tiny/train.csv").read_text().splitlines()[1:]]
    assert losses[-1] < losses[0] - 0.5


def test_transformers_loads_the_merged_folder_with_our_logits(done: tuple[Path, str]) -> None:
    folder = done[0] / "merged" / "tiny"
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ours, tokenizer = load_model(folder)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(folder)("The value of the place")["input_ids"]])
    assert tokenizer is not None and tokens[0].tolist() == tokenizer.encode("The value of the place").tolist()
    with torch.no_grad():
        difference = (theirs(tokens).logits - ours(tokens)).abs().max()
    assert theirs.config.vocab_size == 50257 and theirs.config.eos_token_id == 50256
    assert difference < 1e-4


def test_evaluation_is_that_of_the_last_validation(done: tuple[Path, str]) -> None:
    run, _ = done
    evaluated = read_json(run / "evaluation" / "tiny.json")
    assert evaluated["part"] == "valid"
    assert evaluated["loss"] == pytest.approx(read_json(run / "models/tiny/done.json")["valid_loss"], rel=0.02)


@pytest.mark.slow  # tests/training and test_run.py cover its halves
def test_a_run_killed_in_training_goes_on_to_the_same_weights(
    done: tuple[Path, str], tmp_path: Path, site: Path
) -> None:
    lay_out(tmp_path, site)
    process = start(tmp_path)
    models = tmp_path / "results/x/models/tiny"
    deadline = time.monotonic() + 120
    while not (models / "iter_0000004").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    kill_tree(process)
    assert not (models / "done.json").exists()
    finish(tmp_path)
    assert "resumed from" in "".join(path.read_text() for path in (models / "logs").glob("*_0_log.out"))
    for name in ("merged/tiny/model.safetensors", "models/tiny/valid.csv", "samples/tiny.txt"):
        assert (tmp_path / "results/x" / name).read_bytes() == (done[0] / name).read_bytes(), name


def test_everything_done_is_not_done_again(done: tuple[Path, str]) -> None:
    run, _ = done
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    output = finish(run.parent.parent)
    assert "Nothing to be done" in output and "tiny continues 'The'" in output
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before
