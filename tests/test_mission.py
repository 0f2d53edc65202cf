"""Each library that the toolkit is built on does the work that it was chosen for.

A test fails if its part is replaced by something else, so that no refactoring does that unnoticed.
What merge_mp does to the shards of tensor and pipeline ranks: tests/convert/test_every_origin.py.
"""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasketch
import ftfy
import langdetect.detector
import newspaper
import numpy as np
import pytest
import submitit
import tldextract
import torch
from langdetect.language import Language as Guess
from submitit.helpers import DelayedSubmission
from torch.optim.adamw import adamw

from cluster import TrainingJob, submission
from cluster.submission import make_snapshot
from common.settings import DedupSettings, Experiment, ModelSettings, ScrapeSettings
from corpus.clean import main as clean
from corpus.dedup.shingles import MinHasher, codes, shingle_hash
from corpus.extract.extractors import extract, load_extractors
from corpus.index import IndexedDataset
from corpus.urls import hosts
from tests.cluster.helpers import settings
from tests.helpers import document, prose, read_rejects, read_shard, run_main, write_shard
from tests.training.helpers import byte_documents, write_corpus
from tests.training.reference import tiny_model
from tests.workflow import pipeline
from training import optimizer
from training.dataset.corpus import Corpus, Samples, permutation
from training.kernels import library
from training.kernels.build import SOURCES, find_nvcc
from training.parallel.layout import fuse_residual_norm
from workflow.demo import __main__ as demo

UNSURE = "Kaffe latte no problem: menu, taxi, hotel, restaurant, internet."  # no language leads
EXPERIMENT = Experiment(model=ModelSettings(n_layer=1, n_head=2, n_embd=8), train={"iterations": 1})


def test_snakemake_plans_every_step_from_urls_to_a_model(tmp_path: Path) -> None:
    pipeline.configure(tmp_path, site=None, scrape={"contact": "me@site.example"})
    (tmp_path / "site").mkdir()
    (tmp_path / "site/urls.txt").write_text("http://site.example/a\n")
    assert list(pipeline.SNAKEMAKE) == demo.SNAKEMAKE
    jobs, _ = pipeline.planned(tmp_path, "merge_tiny")
    assert jobs.keys() >= {"blacklist", "scrape", "clean", "tokenize", "merge_index", "train", "merge"}


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


def test_cleaned_text_is_what_ftfy_made_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ftfy, "fix_text", lambda text, **_: f"ftfy saw {len(text)} characters\n")
    broken = "The naÃ¯ve cafÃ©.\n"
    shard = write_shard(tmp_path / "in.jsonl.zst", [document(1, prose(1) + "\n" + broken)])
    assert run_main(clean, "--input", shard, "--output", tmp_path / "out.jsonl.zst") == 0
    assert read_shard(tmp_path / "out.jsonl.zst")[0]["text"].endswith(f"ftfy saw {len(broken)} characters\n")


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


def test_registered_domains_follow_tldextracts_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
    for host in ("news.bbc.co.uk", "a.b.github.io", "www.ck", "x.y.kobe.jp"):
        assert hosts.registered_domain(host) == theirs(host).top_domain_under_public_suffix
    own = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None, extra_suffixes=["bbc.co.uk"])
    monkeypatch.setattr(hosts, "_SNAPSHOT", own)
    hosts._rules.cache_clear()
    try:
        assert hosts.registered_domain("www.news.bbc.co.uk") == "news.bbc.co.uk"
    finally:
        hosts._rules.cache_clear()


def test_tokens_are_numpy_arrays_in_place_on_the_disk_and_numpy_draws_their_order(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", byte_documents(9))
    tokens = IndexedDataset(tmp_path / "c").tokens
    assert type(tokens) is np.memmap
    assert tokens.tolist() == np.fromfile(tmp_path / "c.bin", np.uint16).tolist()
    sample = Samples(Corpus.open(tmp_path / "c"), range(9), 16, seed=1).sample(3)
    assert type(sample) is np.ndarray and sample.dtype == np.int64
    drawn = np.random.PCG64(np.random.SeedSequence((5,))).random_raw(100)
    assert permutation(100, 5).tolist() == np.argsort(drawn >> np.uint64(7), kind="stable").tolist()


def test_torch_computes_the_gradients_and_takes_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = tiny_model(64), []
    parameters = dict(model.named_parameters())
    adam = optimizer.make_optimizer(parameters, EXPERIMENT)
    assert isinstance(model, torch.nn.Module) and isinstance(adam, torch.optim.AdamW)
    assert optimizer.adamw is adamw
    monkeypatch.setattr(optimizer, "adamw", lambda tensors, *_, **__: taken.extend(tensors))
    model(torch.arange(8)[None]).sum().backward()
    assert all(parameter.grad is not None for parameter in parameters.values())
    adam.step(0.1, torch.ones(()))
    assert {tensor.data_ptr() for tensor in taken} == {tensor.data_ptr() for tensor in parameters.values()}


def test_the_models_operations_call_the_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    monkeypatch.setattr(library, "call", lambda name, *_: called.add(name))
    monkeypatch.setattr(library, "_devices", frozenset({"cpu"}))  # as if a library were loaded for it
    model = tiny_model(64)
    for block in model.h.values():
        fuse_residual_norm(block)
    adam = optimizer.make_optimizer(dict(model.named_parameters()), EXPERIMENT)
    with library.using(library.KERNELS):
        model(torch.arange(8)[None]).sum().backward()
        adam.step(0.1, torch.ones(()))
    assert called >= {"bias_gelu", "bias_gelu_backward", "add_dropout_norm", "add_dropout_norm_backward", "adamw"}
    sources = "".join(path.read_text() for path in SOURCES.glob("*.cu"))
    assert all(f"{name}(" in sources for name in called) and "__global__" in sources


def test_nvcc_compiles_the_cuda_kernels(tmp_path: Path) -> None:
    compiler = find_nvcc() or pytest.skip("no nvcc: pip install '.[gpu]'")
    command = [compiler, "-std=c++17", "-arch=sm_90", "-ptx", "-o", "heads.ptx", str(SOURCES / "heads.cu")]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert ".visible .entry" in (tmp_path / "heads.ptx").read_text()
