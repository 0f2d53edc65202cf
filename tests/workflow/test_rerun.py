"""Which jobs a changed key repeats: for every key of the configuration, and for some according to Snakemake itself."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common import rule_keys
from common.files import fingerprint
from common.settings import Experiment, Section, Settings
from common.yaml_text import with_overrides
from tests.workflow.pipeline import LINKED, ROOT, planned, snakemake

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


def under(section: str, changes: str) -> list[str]:
    """Changes of single keys of a section, whose values have no spaces."""
    return [f"{section}.{change}" for change in changes.split()]


SLURM = """partition=p account=a qos=q constraint=c reservation=r exclusive=yes sbatch=[--nice] setup=[true]"""
JOB = f"{SLURM} gpus_per_node=9 cpus_per_task=9 mem_gb_per_task=9 gres=gpu:a100 gpu=h100"
SCRAPE = """
    user_agent=urls/2 contact=me@site.example concurrency=9 host_delay=9 connect_timeout=9 read_timeout=9 page_timeout=9
    retries=9 retry_delay=9 host_failures=9 extract_timeout=9 extract_memory_mb=900 robot_name=urls archive=yes
"""
TRAIN_ALIKE = """
    micro_batch_size=1 accumulation=2 recompute=full compile=true attention=math loss=chunked kernels=off
    deterministic=yes readers=9 log_interval=9 eval_batches=9 save_interval=9 async_save=true eval_interval=9
    keep_last=9 keep_every=9 allow_slow=yes allow_tight=yes
"""
TRAIN = """
    iterations=9 global_batch_size=8 lr=9 min_lr=1e-6 warmup=0.5 warmup_iterations=2 lr_decay=linear decay_iterations=3
    weight_decay=9 eps=9 betas=[0.5,0.6] clip_grad=9 seed=9 precision=float32 initial_loss_scale=9 loss_scale_window=9
    hysteresis=9 reset_position_ids=yes eod_mask_loss=yes
"""
GOPHER = """
    enabled=yes min_words=9 max_words=9 min_word_length=9 max_word_length=9 max_symbols=0.5 max_bullets=0.5
    max_ellipses=0.5 min_alphabetic=0.5 min_stop_words=1
"""

# Rules whose params change -> the changes that do it, each alone. Rules after them run because their input is new.
CHANGES: dict[str, list[str]] = {
    "": [
        *("max_bad_share=0.5", "train_models=[]", "scrape.resolve={a.example: 127.0.0.1:80}"),
        *under("dedup", "jobs=3 memory_gb=9"),
        *under("scrape", SCRAPE),
        *under("tokenize", "encoder_json=results/x/tokenizer/encoder.json vocab_bpe=results/x/tokenizer/vocab.bpe"),
        *under("cluster", JOB),
        *under("cluster", "executor=slurm tasks_per_node=9 container=run signal_seconds=9 max_restarts=9 interface=lo"),
        *under("cluster.corpus", f"{SLURM} shards_per_job=9 max_tasks=9"),
        *("cluster.corpus.runtime_minutes={scrape: 9}", "cluster.corpus.partitions={scrape: p}"),
        f"cluster.gpus={{own: {OWN_GPU}}}",
        *under("models.tiny.slurm", JOB),
        *under("models.tiny.train", TRAIN_ALIKE),
        *under("models.tiny", "parallel=auto parallel.pipeline=2 time_limit_minutes=9"),
        *under("models.tiny.watch", "non_finite=skip spike=9 spike_reaction=stop silence_seconds=9"),
        *under("models.tiny.log", "tensorboard=no wandb=w peak_tflops=9"),
        "models.tiny.parallel={tensor: 2, sequence_parallel: true}",
        "models.tiny.parallel={pipeline: 2, virtual_stages: 2, schedule: interleaved_1f1b}",
        *("models.tiny.parallel={data: 4, zero_stage: 2, offload: true}", "models.tiny.parallel={auto: true, gpus: 8}"),
    ],
    "blacklist": under("blacklist", "min_score=9 over_18=yes self_posts=yes"),
    "blacklist scrape": under(
        "blacklist",
        "min_length=10 allow_private_hosts=yes extra_domains=[x.example] domain_lists=[list]"
        " extra_suffixes=[x.example] extra_patterns=[x] extra_extensions=[.x]",
    ),
    "scrape": under("scrape", "extractors=[newspaper3k] max_bytes=9 max_redirects=9 obey_robots=no"),
    "ingest": ["sources=[{path: other, text_key: t, format: text}]"],
    "clean": [
        *under("clean", "language=no min_characters=9 javascript_characters=9 fold_whitespace=yes"),
        *under("clean.gopher", GOPHER),
    ],
    "dedup_signatures": under("dedup", "shingle_characters=9 shingle_words=9 bands=9 rows=9 seed=9"),
    "dedup_verify": ["dedup.threshold=0.9"],
    "decontaminate_count decontaminate": under("decontaminate", "min_words=9 max_words=12"),
    "decontaminate": under("decontaminate", "max_count=9 cut_characters=9 min_characters=9 max_pieces=9"),
    "train_tokenizer train": ["train_tokenizer={vocab_size: 301}"],
    "train_tokenizer": ["train_tokenizer.share=0.5"],
    "tokenize": under("tokenize", "min_tokens=9 append_eod=no"),
    "train": [
        *under("models.tiny.model", "n_layer=3 n_head=4 n_embd=16 seq_len=9 dropout=0.5"),
        *("models.tiny.finetune=folder", "models.tiny.data=[{prefix: books, weight: 2}]"),
        *under("models.tiny.train", TRAIN),
    ],
    "train evaluate": ["models.tiny.train.split=98,1,1"],
    "evaluate": ["evaluate.max_tokens=9"],
    "generate": under(
        "generate", "prompt=x max_tokens=9 temperature=0 top_k=9 top_p=0.5 repetition_penalty=1.2 seed=9 samples=2"
    ),
}

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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that Snakemake considers finished: every output with its metadata, and no temporary file."""
    folder = tmp_path_factory.mktemp("finished")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in ("urls.txt", "texts", "set.txt"):
        (folder / name).write_text("x")
    (folder / "config.yaml").write_text(yaml.safe_dump(BASE))
    for row in snakemake(folder, "all", "--detailed-summary").stdout.splitlines():
        if row.startswith("results/"):
            path = folder / row.split("\t")[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    for stats, name in (("ingest/stats.json", "texts"), ("urls/stats.json", "urls.txt")):
        (folder / "results/x" / stats).write_text(json.dumps({"inputs": {name: fingerprint(folder / name)}}))
    assert snakemake(folder, "all", "--touch", "--forceall").returncode == 0
    assert not list((folder / "results/x/dedup/work").glob("*"))
    return folder


def plan(folder: Path, *changes: str) -> tuple[set[str], str]:
    """The rules that Snakemake would run after these changes, and what it says."""
    (folder / "other.yaml").write_text(yaml.safe_dump(with_overrides(BASE, changes)))
    jobs, output = planned(folder, "all", "--configfile", "other.yaml")
    return jobs.keys() - {"total"}, output


def test_keys_that_change_no_result_and_inputs_with_another_time_alone_repeat_nothing(finished: Path) -> None:
    alone = ("train_models", "models.tiny.parallel", "models.tiny.train.accumulation", "cluster.executor", "tokenize")
    changes = [change for change in CHANGES[""] if not change.startswith(alone)]
    assert len(changes) > 40
    for name in ("urls.txt", "texts", "set.txt"):
        os.utime(finished / name)
    _, output = plan(finished, *changes, "models.tiny.parallel={tensor: 2, pipeline: 2, data: 2}")
    assert "Nothing to be done" in output, output
    assert "provenance" not in output, "and it compared"


def test_another_content_of_an_input_repeats_the_steps_that_read_it(finished: Path) -> None:
    for name in ("texts", "set.txt"):
        (finished / name).write_text("y")
        os.utime(finished / name, (1, 1))  # older than the results
    rules, output = plan(finished)
    for name in ("texts", "set.txt"):
        (finished / name).write_text("x")
    assert "note: texts: " in output
    assert {"ingest", "decontaminate_count"} <= rules and "blacklist" not in rules


AFTER_DATASET = {"train", "merge", "evaluate", "generate", "report", "all"}
AFTER_CLEAN = {
    *("clean", "dedup_signatures", "dedup_signed", "dedup_clusters", "dedup", "decontaminate_count"),
    *("decontaminate_sum", "decontaminate", "train_tokenizer", "tokenize", "merge_index"),
    *(f"dedup_{phase}_{job}" for phase in ("bands", "verify") for job in range(3)),
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (("clean.language=no", "dedup.jobs=3"), AFTER_CLEAN | AFTER_DATASET),
        (("models.tiny.train.lr=0.1",), AFTER_DATASET),
        (("generate.prompt=x",), {"generate", "report", "all"}),
    ],
)
def test_snakemake_plans_what_comes_after_a_changed_key_and_nothing_else(
    finished: Path, changes: tuple[str, ...], expected: set[str]
) -> None:
    assert plan(finished, *changes)[0] == expected
