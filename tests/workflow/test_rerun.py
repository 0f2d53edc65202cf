"""Which jobs a changed key repeats: for every key of the configuration, and for some according to Snakemake itself."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common import rule_keys
from common.files import fingerprint
from common.settings import Experiment, Section, Settings
from common.yaml_text import with_overrides
from tests.conftest import ROOT

BASE: dict[str, Any] = {
    "run": "results/x",
    "urls": ["urls.txt"],
    "scrape": {"contact": "you@site.example"},
    "sources": [{"path": "texts"}],
    "decontaminate": {"files": ["set.txt"]},
    "train_tokenizer": {"vocab_size": 300},
    "train_models": ["tiny"],
    "models": {
        "tiny": {
            "model": {"n_layer": 4, "n_head": 2, "n_embd": 8, "vocab_size": 300},
            "train": {"iterations": 4, "global_batch_size": 16},
        }
    },
}

OWN_GPU = "{memory_gib: 9, float32_tflops: 9, memory_gb_per_s: 9, node_gb_per_s: 9, network_gb_per_s: 9}"

# Rules whose params change -> the changes that do it, each alone. Rules after them run because their input is new.
CHANGES: dict[str, list[str]] = {
    "": [
        *("max_bad_share=0.5", "train_models=[]", "dedup.jobs=3", "dedup.memory_gb=9"),
        *("scrape.user_agent=urls/2", "scrape.contact=me@site.example", "scrape.resolve={a.example: 127.0.0.1:80}"),
        *("scrape.concurrency=9", "scrape.host_delay=9", "scrape.connect_timeout=9", "scrape.read_timeout=9"),
        *("scrape.page_timeout=9", "scrape.retries=9", "scrape.retry_delay=9", "scrape.host_failures=9"),
        *("scrape.extract_timeout=9", "scrape.extract_memory_mb=900", "scrape.robot_name=urls", "scrape.archive=yes"),
        *("tokenize.encoder_json=results/x/tokenizer/encoder.json", "tokenize.vocab_bpe=results/x/tokenizer/vocab.bpe"),
        *("cluster.executor=slurm", "cluster.gpus_per_node=9", "cluster.tasks_per_node=9", "cluster.cpus_per_task=9"),
        *("cluster.mem_gb_per_task=9", "cluster.partition=p", "cluster.account=a", "cluster.qos=q"),
        *("cluster.constraint=c", "cluster.reservation=r", "cluster.exclusive=yes", "cluster.sbatch=[--nice]"),
        *("cluster.setup=[true]", "cluster.gres=gpu:a100", "cluster.container=run", "cluster.signal_seconds=9"),
        *("cluster.max_restarts=9", "cluster.corpus.partition=p", "cluster.corpus.account=a", "cluster.corpus.qos=q"),
        *("cluster.corpus.constraint=c", "cluster.corpus.reservation=r", "cluster.corpus.exclusive=yes"),
        *("cluster.corpus.sbatch=[--nice]", "cluster.corpus.setup=[true]", "cluster.corpus.shards_per_job=9"),
        *("cluster.corpus.max_tasks=9", "cluster.interface=lo", "cluster.corpus.runtime_minutes={scrape: 9}"),
        *("models.tiny.parallel={tensor: 2, sequence_parallel: true}", "models.tiny.parallel.pipeline=2"),
        *("models.tiny.parallel={pipeline: 2, virtual_stages: 2, schedule: interleaved_1f1b}",),
        *("models.tiny.parallel={data: 4, zero_stage: 2, offload: true}", "models.tiny.train.micro_batch_size=1"),
        *("models.tiny.train.accumulation=2", "models.tiny.train.recompute=full", "models.tiny.train.compile=true"),
        *("models.tiny.train.attention=math", "models.tiny.train.loss=chunked", "models.tiny.train.kernels=off"),
        *("models.tiny.train.deterministic=yes",),
        *("models.tiny.train.readers=9", "models.tiny.train.log_interval=9", "models.tiny.train.eval_interval=9"),
        *("models.tiny.train.eval_batches=9", "models.tiny.train.save_interval=9", "models.tiny.train.async_save=true"),
        *("models.tiny.train.keep_last=9", "models.tiny.train.keep_every=9", "models.tiny.time_limit_minutes=9"),
        *("models.tiny.slurm.partition=p", "models.tiny.slurm.account=a", "models.tiny.slurm.qos=q"),
        *("models.tiny.slurm.constraint=c", "models.tiny.slurm.reservation=r", "models.tiny.slurm.exclusive=yes"),
        *("models.tiny.slurm.sbatch=[--nice]", "models.tiny.slurm.setup=[true]", "models.tiny.slurm.gres=gpu:a100"),
        *("models.tiny.slurm.gpus_per_node=9", "models.tiny.slurm.gpu=h100", "models.tiny.slurm.cpus_per_task=9"),
        *("models.tiny.slurm.mem_gb_per_task=9", "cluster.corpus.partitions={scrape: p}"),
        *("models.tiny.watch.non_finite=skip", "models.tiny.watch.spike=9", "models.tiny.watch.spike_reaction=stop"),
        *("models.tiny.watch.silence_seconds=9", "models.tiny.log.tensorboard=no", "models.tiny.log.wandb=w"),
        *("models.tiny.log.peak_tflops=9", "models.tiny.train.allow_slow=yes", "models.tiny.train.allow_tight=yes"),
        *("cluster.gpu=h100", f"cluster.gpus={{own: {OWN_GPU}}}"),
        *("models.tiny.parallel=auto", "models.tiny.parallel={auto: true, gpus: 8}"),
    ],
    "blacklist": ["blacklist.min_score=9", "blacklist.over_18=yes", "blacklist.self_posts=yes"],
    "blacklist scrape": [
        *("blacklist.min_length=10", "blacklist.allow_private_hosts=yes", "blacklist.extra_domains=[x.example]"),
        *("blacklist.domain_lists=[list]", "blacklist.extra_suffixes=[x.example]", "blacklist.extra_patterns=[x]"),
        *("blacklist.extra_extensions=[.x]",),
    ],
    "scrape": [
        *("scrape.extractors=[newspaper3k]", "scrape.max_bytes=9", "scrape.max_redirects=9", "scrape.obey_robots=no"),
    ],
    "ingest": ["sources=[{path: other, text_key: t, format: text}]"],
    "clean": [
        *("clean.language=no", "clean.min_characters=9", "clean.javascript_characters=9", "clean.gopher.enabled=yes"),
        *("clean.fold_whitespace=yes",),
        *("clean.gopher.min_words=9", "clean.gopher.max_words=9", "clean.gopher.min_word_length=9"),
        *("clean.gopher.max_word_length=9", "clean.gopher.max_symbols=0.5", "clean.gopher.max_bullets=0.5"),
        *("clean.gopher.max_ellipses=0.5", "clean.gopher.min_alphabetic=0.5", "clean.gopher.min_stop_words=1"),
    ],
    "dedup_signatures": [
        *("dedup.shingle_characters=9", "dedup.shingle_words=9", "dedup.bands=9", "dedup.rows=9", "dedup.seed=9"),
    ],
    "dedup_verify": ["dedup.threshold=0.9"],
    "decontaminate_count decontaminate": ["decontaminate.min_words=9", "decontaminate.max_words=12"],
    "decontaminate": [
        *("decontaminate.max_count=9", "decontaminate.cut_characters=9", "decontaminate.min_characters=9"),
        *("decontaminate.max_pieces=9",),
    ],
    "train_tokenizer train": ["train_tokenizer={vocab_size: 301}"],
    "train_tokenizer": ["train_tokenizer.share=0.5"],
    "tokenize": ["tokenize.min_tokens=9", "tokenize.append_eod=no"],
    "train": [
        *("models.tiny.model.n_layer=3", "models.tiny.model.n_head=4", "models.tiny.model.n_embd=16"),
        *("models.tiny.model.seq_len=9", "models.tiny.model.dropout=0.5", "models.tiny.finetune=folder"),
        *("models.tiny.data=[{prefix: books, weight: 2}]", "models.tiny.train.iterations=9"),
        *("models.tiny.train.global_batch_size=8", "models.tiny.train.lr=9", "models.tiny.train.min_lr=1e-6"),
        *("models.tiny.train.warmup=0.5", "models.tiny.train.warmup_iterations=2", "models.tiny.train.lr_decay=linear"),
        *("models.tiny.train.decay_iterations=3", "models.tiny.train.weight_decay=9", "models.tiny.train.eps=9"),
        *("models.tiny.train.betas=[0.5, 0.6]", "models.tiny.train.clip_grad=9", "models.tiny.train.seed=9"),
        *("models.tiny.train.precision=float32", "models.tiny.train.initial_loss_scale=9"),
        *("models.tiny.train.loss_scale_window=9", "models.tiny.train.hysteresis=9"),
        *("models.tiny.train.reset_position_ids=yes", "models.tiny.train.eod_mask_loss=yes"),
    ],
    "train evaluate": ["models.tiny.train.split=98,1,1"],
    "evaluate": ["evaluate.max_tokens=9"],
    "generate": [
        *("generate.prompt=x", "generate.max_tokens=9", "generate.temperature=0", "generate.top_k=9"),
        *("generate.top_p=0.5", "generate.repetition_penalty=1.2", "generate.seed=9", "generate.samples=2"),
    ],
}  # fmt: skip

# Keys whose value is a list of files or a part of every path: Snakemake compares the files.
FILES = {"run", "urls", "site", "shards", "decontaminate.files"}
MODEL_RULES = {"train": rule_keys.train, "evaluate": rule_keys.evaluate}
RULES = {
    name: getattr(rule_keys, name)
    for name in (
        *("blacklist", "scrape", "ingest", "clean", "dedup_signatures", "dedup_verify", "decontaminate_count"),
        *("decontaminate", "train_tokenizer", "tokenize", "generate"),
    )
}


def params(override: str | None = None) -> dict[str, object]:
    """The params that Snakemake compares, by rule."""
    raw = BASE if override is None else with_overrides(BASE, [override])
    if override and override.startswith("train_tokenizer={"):
        raw = with_overrides(raw, ["models.tiny.model.vocab_size=301"])
    settings = Settings.model_validate(raw)
    found: dict[str, object] = {name: keys(settings) for name, keys in RULES.items()}
    return found | {name: keys(settings, "tiny") for name, keys in MODEL_RULES.items()}


def leaves(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = Experiment if name == "models" else field.annotation
        key = f"{prefix}{name}" + (".tiny" if name == "models" else "")
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaves(kind, f"{key}.")
        else:
            yield key


@pytest.mark.parametrize("rules", CHANGES)
def test_a_changed_key_changes_the_params_of_the_rules_that_depend_on_it_and_of_no_other(rules: str) -> None:
    before = params()
    for change in CHANGES[rules]:
        after = params(change)
        assert {name for name in before if before[name] != after[name]} == set(rules.split()), change


def test_every_key_of_the_configuration_stands_in_the_table() -> None:
    changes = [change.partition("=") for listed in CHANGES.values() for change in listed]
    named = {key for key, _, _ in changes}
    named |= {f"{key}.{inner}" for key, _, value in changes if value.startswith("{") for inner in yaml.safe_load(value)}
    together = {"models.tiny.model.vocab_size"}  # with train_tokenizer.vocab_size, see params()
    assert set(leaves(Settings)) - named - together == FILES


def snakemake(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "snakemake", "all", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that Snakemake considers finished: every output with its metadata, and no temporary file."""
    folder = tmp_path_factory.mktemp("finished")
    for name in ("Snakefile", "workflow", "profiles"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("urls.txt", "texts", "set.txt"):
        (folder / name).write_text("x")
    (folder / "config.yaml").write_text(yaml.safe_dump(BASE))
    for row in snakemake(folder, "--detailed-summary").splitlines():
        if row.startswith("results/"):
            path = folder / row.split("\t")[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    for stats, name in (("ingest/stats.json", "texts"), ("urls/stats.json", "urls.txt")):
        (folder / "results/x" / stats).write_text(json.dumps({"inputs": {name: fingerprint(folder / name)}}))
    snakemake(folder, "--touch", "--forceall")
    assert not list((folder / "results/x/dedup/work").glob("*"))
    return folder


def plan(folder: Path, *changes: str) -> str:
    raw = with_overrides(BASE, changes)
    (folder / "other.yaml").write_text(yaml.safe_dump(raw))
    return snakemake(folder, "-n", "--configfile", "other.yaml")


def test_the_keys_that_change_no_result_make_snakemake_do_nothing(finished: Path) -> None:
    alone = ("train_models", "models.tiny.parallel", "models.tiny.train.accumulation", "cluster.executor", "tokenize")
    changes = [change for change in CHANGES[""] if not change.startswith(alone)]
    assert len(changes) > 40
    for parallel in ("", "models.tiny.parallel={tensor: 2, pipeline: 2, data: 2}"):
        output = plan(finished, *changes, *filter(None, [parallel]))
        assert "Nothing to be done" in output, output
        assert "provenance" not in output, "and it compared"


def test_only_another_content_of_an_input_repeats_a_step_not_another_time(finished: Path) -> None:
    for name in ("urls.txt", "texts", "set.txt"):
        os.utime(finished / name)
    assert "Nothing to be done" in plan(finished)
    for name in ("texts", "set.txt"):
        (finished / name).write_text("y")
        os.utime(finished / name, (1, 1))  # older than the results
    planned = plan(finished)
    for name in ("texts", "set.txt"):
        (finished / name).write_text("x")
    assert "note: texts: changed since it was read" in planned and "rule ingest" in planned
    assert "rule decontaminate_count" in planned and "rule blacklist" not in planned


AFTER_DEDUP = {
    "dedup",
    "decontaminate_count",
    "decontaminate_sum",
    "decontaminate",
    "train_tokenizer",
    "tokenize",
    "merge_index",
}
AFTER_DATASET = {"train", "merge", "evaluate", "generate", "report", "all"}
DEDUP = {
    "dedup_signatures",
    "dedup_signed",
    "dedup_clusters",
    *(f"dedup_{phase}_{job}" for phase in ("bands", "verify") for job in range(8)),
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("clean.language=no", {"clean"} | DEDUP | AFTER_DEDUP | AFTER_DATASET),
        ("dedup.threshold=0.9", DEDUP | AFTER_DEDUP | AFTER_DATASET),  # signatures are temporary
        ("models.tiny.train.lr=0.1", AFTER_DATASET),
        ("generate.prompt=x", {"generate", "report", "all"}),
    ],
)
def test_snakemake_plans_what_comes_after_a_changed_key_and_nothing_else(
    finished: Path, change: str, expected: set[str]
) -> None:
    output = plan(finished, change)
    table = output[output.index("Job stats:") :].split("\n\n")[0].splitlines()[3:]
    assert {row.split()[0] for row in table} - {"total"} == expected


def test_another_number_of_dedup_jobs_leaves_the_temporary_files_of_a_stopped_run_in_use(finished: Path) -> None:
    output = plan(finished, "dedup.jobs=3", "clean.language=no")
    assert "dedup_bands_2 " in output and "dedup_bands_3 " not in output
