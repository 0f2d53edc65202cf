"""Libraries that the toolkit is built on do the work that they were chosen for.

A test fails if its part is replaced by something else, so that no refactoring does that unnoticed. The tests of the
parts say the same of Snakemake, ftfy, tldextract, gigatoken, PyTorch's autograd and transformers.
"""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasketch
import langdetect.detector
import newspaper
import numpy as np
import pytest
import submitit
import torch
from langdetect.language import Language as Guess
from submitit.helpers import DelayedSubmission
from torch.optim.adamw import adamw

from cluster import TrainingJob, submission
from cluster.submission import make_snapshot
from common.settings import DedupSettings, ScrapeSettings, TrainSettings
from corpus.clean import main as clean
from corpus.dedup.shingles import MinHasher, codes, shingle_hash
from corpus.extract.extractors import extract, load_extractors
from corpus.index import IndexedDataset
from tests.cluster.helpers import settings
from tests.helpers import document, prose, read_rejects, run_main, write_shard
from tests.training.helpers import byte_documents, write_corpus
from tests.training.reference import tiny_model
from training import optimizer
from training.dataset.corpus import permutation
from training.kernels.build import SOURCES, find_nvcc

UNSURE = "Kaffe latte no problem: menu, taxi, hotel, restaurant, internet."  # no language leads


@pytest.mark.parametrize("executor", ["SlurmExecutor", "LocalExecutor"])
def test_submitit_submits_the_training_and_its_process_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    submitted: list[TrainingJob] = []
    kind = executor.removesuffix("Executor").lower()
    snapshot = make_snapshot(settings(tmp_path, {"data": 2}, executor=kind), tmp_path)
    monkeypatch.setattr(
        getattr(submitit, executor), "submit", lambda _, job: submitted.append(job) or SimpleNamespace(job_id="7")
    )
    DelayedSubmission(TrainingJob(f"{snapshot}/settings.yaml", "tiny")).dump(snapshot / "tiny.pkl")
    assert submission.main([str(snapshot / "tiny.pkl"), "60"]) == 0
    trained: list[list[str]] = []
    monkeypatch.setattr("training.train.main", lambda arguments: trained.append(arguments) or 0)
    monkeypatch.setattr("training.launch.signals.leave_at_once", lambda: None)
    submitted[0]()
    assert trained == [["--config", f"{snapshot}/settings.yaml", "--model", "tiny"]]


def test_langdetect_decides_the_language_of_an_unsure_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, rejects = write_shard(tmp_path / "in.jsonl.zst", [document(1, UNSURE)]), tmp_path / "rejects.jsonl.zst"
    asked = ("--input", shard, "--output", tmp_path / "out.jsonl.zst", "--rejects", rejects, "--allow-empty")
    for code, dropped in (("eo", True), ("en", False)):
        monkeypatch.setattr(langdetect.detector.Detector, "get_probabilities", lambda _, code=code: [Guess(code, 0.9)])
        assert run_main(clean, *asked, "clean.min_characters=1") == 0
        assert ["eo" in str(one) for one in read_rejects(rejects)] == [True] * dropped


def test_newspaper3k_extracts_an_article(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = newspaper.Article.parse

    def marked(article: Any) -> None:
        parse(article)
        article.text = f"newspaper3k: {article.text}"

    monkeypatch.setattr(newspaper.Article, "parse", marked)
    page = f"<html><body><article><p>{prose(1)}</p><p>{prose(2)}</p></article></body></html>".encode()
    extractors = load_extractors(ScrapeSettings(extractors=["newspaper3k"]).extractors)
    found = extract(page, "text/html", "http://site.example/", extractors)
    assert found.text.startswith("newspaper3k: ") and prose(2)[:40] in found.text


def test_datasketch_draws_the_permutations_of_minhash(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DedupSettings(bands=4, rows=3)
    for text in ("", "12345", "żółć “quoted” 😀 " * 9, prose(4) * 150):
        theirs = datasketch.MinHash(12, seed=settings.seed, scheme="affine32", hashfunc=int)
        theirs.update_batch([int(value) for value in shingle_hash(codes(text, settings))])
        assert np.array_equal(MinHasher(settings).signature(text), theirs.hashvalues)
    other = datasketch.MinHash(12, seed=settings.seed + 1, scheme="affine32")
    monkeypatch.setattr(datasketch, "MinHash", lambda *_, **__: other)
    assert not np.array_equal(MinHasher(settings).signature(text), theirs.hashvalues)


def test_tokens_are_numpy_arrays_in_place_on_the_disk_and_numpy_draws_their_order(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", byte_documents(9))
    tokens = IndexedDataset(tmp_path / "c").tokens
    assert type(tokens) is np.memmap
    assert tokens.tolist() == np.fromfile(tmp_path / "c.bin", np.uint16).tolist()
    drawn = np.random.PCG64(np.random.SeedSequence((5,))).random_raw(100)
    assert permutation(100, 5).tolist() == np.argsort(drawn >> np.uint64(7), kind="stable").tolist()


def test_torchs_adamw_takes_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = tiny_model(64), list[torch.Tensor]()
    parameters = dict(model.named_parameters())
    adam = optimizer.make_optimizer(parameters, TrainSettings(iterations=1))
    assert isinstance(adam, torch.optim.AdamW) and optimizer.adamw is adamw
    monkeypatch.setattr(optimizer, "adamw", lambda tensors, *_, **__: taken.extend(tensors))
    model(torch.arange(8)[None]).sum().backward()
    optimizer.take_step(adam, 0.1, torch.ones(()))
    assert {tensor.data_ptr() for tensor in taken} == {tensor.data_ptr() for tensor in parameters.values()}


def test_nvcc_compiles_the_cuda_kernels(tmp_path: Path) -> None:
    compiler = find_nvcc() or pytest.skip("no nvcc: pip install '.[gpu]'")
    command = [compiler, "-std=c++17", "-arch=sm_90", "-ptx", "-o", "heads.ptx", str(SOURCES / "heads.cu")]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert ".visible .entry" in (tmp_path / "heads.ptx").read_text()
