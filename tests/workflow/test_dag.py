"""What Snakemake plans: each rule and target, per shard or model, and nothing that must fail."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.training.helpers import byte_documents, write_corpus
from tests.workflow.pipeline import planned, snakemake

PARTS = ("Snakefile", "workflow", "config.yaml", "profiles", "slurm", "configs")
DEMO = {
    "all": 1, "blacklist": 1, "clean": 2, "dedup": 2, "dedup_bands_0": 1, "dedup_clusters": 1, "dedup_signatures": 2,
    "dedup_signed": 1, "dedup_verify_0": 1, "demo_site": 1, "evaluate": 1, "generate": 1, "merge": 1, "merge_index": 1,
    "report": 1, "scrape": 2, "tokenize": 2, "total": 24, "train": 1, "train_tokenizer": 1,
}  # fmt: skip
SMALL = {"model": {"n_layer": 1, "n_head": 1, "n_embd": 8}, "train": {"iterations": 1}}
BOOKS = {"prefix": "books", "weight": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with our configuration and profiles, and no results."""
    for name in PARTS:
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def write(folder: Path, **config: Any) -> tuple[str, str]:
    """Write a configuration; returns the options that choose it."""
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))
    return "--configfile", "mine.yaml"


def test_the_whole_dag_is_planned_with_each_shard_and_all_that_wait_for_all_shards(folder: Path) -> None:
    jobs, output = planned(folder, "all", "--profile", "slurm")
    assert jobs == DEMO
    assert "reason: Missing output files" in output, "a dry run explains itself"
    rules = [line.split()[-1].rstrip(":") for line in output.splitlines() if line.startswith("rule ")]
    order = [rule for rule in rules if rule in ("dedup", "train_tokenizer", "tokenize", "merge_index")]
    assert order == ["dedup", "dedup", "train_tokenizer", "tokenize", "tokenize", "merge_index"]


@pytest.mark.parametrize(("key", "jobs"), [("shards=17", 3), ("dedup={jobs: 2}", 2)])
def test_dedup_plans_one_job_per_8_shards_up_to_its_limit(folder: Path, key: str, jobs: int) -> None:
    rules, _ = planned(folder, "corpus", "--config", "shards=17", key)
    for phase in ("bands", "verify"):
        assert {name for name in rules if phase in name} == {f"dedup_{phase}_{job}" for job in range(jobs)}


def test_every_target_and_every_optional_step_is_planned(folder: Path) -> None:
    write_corpus(folder / "books", byte_documents(3))
    (folder / "texts").mkdir()
    (folder / "set.jsonl").write_text("{}")
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["models"]["tiny"]["data"] = [BOOKS, {"prefix": "results/demo/dataset/corpus_text_document", "weight": 3}]
    config |= {"sources": [{"path": "texts"}], "decontaminate": {"files": ["set.jsonl"]}}
    config |= {"repeats": {"units": ["paragraphs"]}}
    config["cluster"] = {"executor": "slurm", "gpus_per_node": 8}
    merges = [f"merge_{name}" for name in config["models"]]
    targets = ["all", "corpus", "dataset", "report", "cards", *merges, "train_gpt2_7b"]
    jobs, _ = planned(folder, *targets, *write(folder, **config))
    optional = {"ingest": 1, "decontaminate_count": 2, "decontaminate_sum": 1, "decontaminate": 2}
    optional |= {"repeats_count": 2, "repeats_sum": 1, "repeats": 2}
    models = {"train": 4, "merge": 4, **dict.fromkeys(merges, 1), "train_gpt2_7b": 1}
    expected = DEMO | optional | models | {"corpus": 1, "dataset": 1, "cards": 1}
    assert jobs == expected | {"total": sum(expected.values()) - DEMO["total"]}


def test_a_model_with_data_of_its_own_needs_no_corpus_and_one_that_starts_from_another_waits_for_its_merge(
    folder: Path,
) -> None:
    write_corpus(folder / "books", byte_documents(3))
    first = {**SMALL, "data": [BOOKS]}
    models = {"first": first, "second": {**first, "finetune": "results/own/merged/first"}}
    jobs, _ = planned(folder, *write(folder, run="results/own", train_models=["second"], models=models))
    once = ("all", "evaluate", "generate", "report")
    assert jobs == {**dict.fromkeys(once, 1), "train": 2, "merge": 2, "total": 8}


def test_all_asks_which_of_several_models_to_train_and_no_other_target_does(folder: Path) -> None:
    config = {"run": "results/own", "sources": [{"path": "Snakefile", "format": "text"}], "shards": 1}
    one, two = {"first": SMALL}, {"first": SMALL, "second": SMALL}
    jobs, _ = planned(folder, *write(folder, **config, models=one))
    assert jobs["train"] == jobs["merge"] == jobs["evaluate"] == 1, "the only model"
    refused = snakemake(folder, "-n", *write(folder, **config, models=two))
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith(("error", "Traceback", "Exception"))]
    assert refused.returncode == 2 and "`train_models: [first]`" in line and "target train_first" in line
    jobs, output = planned(folder, "dataset", "train_second", "--configfile", "mine.yaml")
    assert jobs["train"] == jobs["merge_index"] == 1 and "train_models" not in output
    jobs, output = planned(folder, *write(folder, **config, models=two, train_models=[]))
    assert "train" not in jobs and jobs["merge_index"] == jobs["report"] == 1
    assert output.count("note: train_models is []: all trains no model; configured: first, second\n") == 1


def test_a_model_that_is_too_large_is_refused_before_its_corpus_is_built_unless_it_is_trained(folder: Path) -> None:
    cluster = ("--config", "cluster={executor: slurm, mem_gb_per_task: 1}")
    result = snakemake(folder, "train_gpt2_345m", *cluster)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith(("error", "Traceback", "Exception"))]
    assert result.returncode == 2 and line.startswith("error: models.gpt2_345m ") and "cluster.mem_gb_per_task" in line
    assert "rule demo_site" not in result.stdout + result.stderr and not (folder / "results").exists()
    done = folder / "results/demo/models/gpt2_345m/done.json"
    done.parent.mkdir(parents=True)
    done.write_text('{"iteration": 320000}')
    planned(folder, "train_gpt2_345m", *cluster)
