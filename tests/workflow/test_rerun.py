"""Which jobs a changed key repeats: for every key, and for some by Snakemake itself."""

import json
import os
import re
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from common import steps
from common.config import with_overrides, write_settings
from common.files import fingerprint, read_json
from common.settings import Settings, SourceSettings, names
from tests.workflow.pipeline import LINKED, ROOT, planned, snakemake

BASE: dict[str, Any] = {
    "run": "results/x",
    "urls": ["urls.txt"],
    "scrape": {"contact": "you@site.example"},
    "sources": [{"path": "texts", "format": "text"}],
    "repeats": {"units": ["lines"]},
    "decontaminate": {"files": ["set.txt"]},
    "train_tokenizer": {"vocab_size": 300},
    "evaluate": {"tasks": ["quiz"], "task_dir": "tasks"},
    "train_models": ["tiny"],
    "models": {
        "tiny": {
            "model": {"n_layer": 4, "n_head": 2, "n_embd": 8, "vocab_size": 300},
            "train": {"iterations": 4, "global_batch_size": 16},
        }
    },
}

# One change of each kind -> the steps whose settings it changes. Steps after them run because their
# input is new.
CHANGES = {
    "blacklist.over_18=true": "blacklist",
    "blacklist.extra_domains=[x.example]": "blacklist scrape",
    "scrape.max_bytes=9": "scrape",
    "scrape.opt_outs=obey": "scrape",
    "sources=[{path: other}]": "ingest",
    "clean.language=no": "clean",
    "dedup.seed=9": "dedup_signatures",
    "dedup.threshold=0.8": "dedup_clusters",
    "repeats.min_bytes=9": "repeats_count",
    "repeats.max_count=9": "repeats_sum",
    "repeats.keep_first=false": "repeats",
    "decontaminate.min_words=9": "decontaminate_count decontaminate",
    "decontaminate.max_count=9": "decontaminate",
    "train_tokenizer.share=0.5": "train_tokenizer",
    "tokenize.min_tokens=9": "tokenize",
    "models.tiny.model.dropout=0.2": "train",
    "models.tiny.train.lr=0.1": "train",
    "models.tiny.train.split='9,1,0'": "train evaluate",
    "evaluate.max_samples=9": "evaluate",
    "generate.prompt=x": "generate",
    # keys that decide others: those are what they were
    "models.tiny.train.micro_batch_size=1": "",
    "models.tiny.train.accumulation=2": "",
    "models.tiny.parallel={tensor: 2, sequence_parallel: true}": "",
    "models.tiny.parallel={pipeline: 2, virtual_stages: 2, schedule: interleaved_1f1b}": "",
    "models.tiny.parallel={data: 4, zero_stage: 2, offload: true}": "",
}
# Changes of which Snakemake's plan knows nothing
HARMLESS = (
    *("scrape.contact=me@site.example", "scrape.concurrency=9", "scrape.retries=9", "max_bad_share=0.5"),
    *("dedup.memory_gb=9", "dedup.ranges=2", "dedup.jobs=3", "repeats.memory_gb=9", "scrape.archive=true"),
    *("evaluate.batch=9", "models.tiny.train.save_interval=9", "models.tiny.train.recompute=full"),
    *("models.tiny.train.profile=[1,2]", "models.tiny.train.profile_ranks=[1]"),
    *("models.tiny.slurm.partition=p", "models.tiny.log.wandb=w", "cluster.corpus.shards_per_job=9"),
    "models.tiny.parallel={tensor: 2, pipeline: 2, data: 2}",
)


# Keys that no step names: how a run is executed, and what Snakemake compares as paths
FREE = """run urls base site shards max_bad_share train_models models cluster tokenize.encoder_json tokenize.vocab_bpe
    dedup.ranges dedup.jobs dedup.memory_gb repeats.memory_gb scrape.user_agent scrape.robot_name scrape.contact
    scrape.resolve scrape.concurrency scrape.host_delay scrape.connect_timeout scrape.read_timeout scrape.page_timeout
    scrape.retries scrape.retry_delay scrape.host_failures scrape.extract_timeout scrape.extract_memory_mb
    scrape.archive fetch"""


def params(settings: Settings) -> dict[str, dict[str, Any]]:
    """The settings that Snakemake compares, by step."""
    return {step.name: steps.keys(step.name, settings, "tiny") for step in (*steps.CORPUS, *steps.MODELS)}


def test_a_changed_key_changes_the_params_of_the_rules_that_depend_on_it_and_of_no_other() -> None:
    before = params(Settings.model_validate(BASE))
    for change, expected in [*CHANGES.items(), *((harmless, "") for harmless in HARMLESS)]:
        after = params(Settings.model_validate(with_overrides(BASE, [change])))
        assert {name for name in before if steps.changed(before[name], after[name])} == set(expected.split()), change


def test_a_key_that_one_version_lacks_is_a_change_only_if_it_is_not_at_its_default() -> None:
    """Also at the first run of a version without the key, or one whose other keys were changed."""
    change = ["clean.fasttext=[{path: a, label: b, least: 0.1}]", "models.tiny.train.eps=0.1", "generate.top_p=0.5"]
    settings = Settings.model_validate(with_overrides(BASE, change))
    for step in (*steps.CORPUS, *steps.MODELS):
        whole = steps.keys(step.name, settings, "tiny")
        assert not steps.changed(whole, whole)
        for name in set(names(whole)) - {"given"}:
            other = json.loads(json.dumps(whole))
            *parents, key = name.split(".")
            holder = reduce(lambda found, part: found[int(part) if part.isdigit() else part], parents, other)
            value = holder.pop(key)
            other["given"] = sorted({*whole["given"]} & {*names(other)})
            for then, now in ((whole, other), (other, whole)):
                assert steps.changed(then, now) == (name in whole["given"]), (step.name, name)
            holder[key] = [value]
            assert steps.changed(whole, other), "a value of both versions counts, default or not"


def test_a_new_key_is_classified() -> None:
    """It is named by a step, which may take its whole section, or by FREE."""
    before = Settings.model_validate(BASE)
    named = {key for step in (*steps.CORPUS, *steps.MODELS) for key in step.keys}
    parts = {key.partition(".")[0] for key in named} - named - {"models"}
    keys = {f"{part}.{key}" for part in parts for key in type(getattr(before, part)).model_fields}
    assert (keys | set(Settings.model_fields)) - named - parts == set(FREE.split())
    named = {*steps.keys("ingest", before)["sources"][0]}
    assert named == {*SourceSettings.model_fields} - {"keep", "anonymous"}, "such as encoding"


def test_warc_files_as_sources_are_read_again_when_the_rules_for_pages_change(tmp_path: Path) -> None:
    for name, format, depends in (("a.txt", "auto", False), ("a.warc.gz", "auto", True), ("a", "warc", True)):
        (tmp_path / name).write_text("x")
        settings = Settings.model_validate(BASE | {"sources": [{"path": str(tmp_path / name), "format": format}]})
        assert ("blacklist" in steps.keys("ingest", settings)) == depends, name


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that Snakemake considers finished: every output with metadata, no temporary file."""
    folder = tmp_path_factory.mktemp("finished")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / "tasks").mkdir()
    for name in ("urls.txt", "texts", "set.txt", "tasks/quiz.yaml"):
        (folder / name).write_text("x")
    (folder / "config.yaml").write_text(yaml.safe_dump(BASE))
    for row in snakemake(folder, "all", "--detailed-summary").stdout.splitlines():
        if row.startswith("results/"):
            path = folder / row.split("\t")[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    (folder / "results/x/models/tiny/done.json").write_text('{"iteration": 4}')
    for stats, name in (("ingest/stats.json", "texts"), ("urls/stats.json", "urls.txt")):
        (folder / "results/x" / stats).write_text(json.dumps({"inputs": {name: fingerprint(folder / name)}}))
    assert snakemake(folder, "all", "--touch", "--forceall").returncode == 0
    assert {path.suffix for path in (folder / "results/x/dedup/work").glob("*")} == {".signatures"}
    return folder


def plan(folder: Path, *changes: str, code: Path = ROOT) -> tuple[set[str], str]:
    """The rules that Snakemake would run after changes, and its output; `code`: the toolkit's."""
    (folder / "other.yaml").write_text(yaml.safe_dump(with_overrides(BASE, changes)))
    version = ("--snakefile", str(code / "Snakefile"))
    jobs, output = planned(folder, "all", *version, "--configfile", "other.yaml", PYTHONPATH=str(code))
    return jobs.keys() - {"total"}, output


def test_every_rule_gives_snakemake_the_settings_of_its_step(finished: Path) -> None:
    records = [read_json(path) for path in (finished / "results/x/records/metadata").rglob("*") if path.is_file()]
    base = Settings.model_validate(BASE)
    for name, settings in params(base).items():
        if not steps.named(name).runs(base):
            continue
        recorded = [record["params"] for record in records if record["rule"] == name]
        without_keys = settings == {"given": []}
        assert recorded and all(without_keys or repr(settings) in found for found in recorded), name


def test_keys_that_change_no_result_and_inputs_with_another_time_alone_repeat_nothing(finished: Path) -> None:
    for name in ("urls.txt", "texts", "set.txt", "tasks/quiz.yaml"):
        os.utime(finished / name)
    (finished / "tasks/utils.pyc").write_text("x")
    _, output = plan(finished, *HARMLESS)
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
    before_scrape = re.search(r"rule ingest:\n(    .+\n)*    priority: 1\n", output)
    assert before_scrape and output.count("    priority: ") == 1, "an error in a source is known at once"
    assert {"ingest", "decontaminate_count"} <= rules and "blacklist" not in rules
    (finished / "tasks/quiz.yaml").write_text("y")
    assert plan(finished)[0] == {"evaluate", "report", "all"}
    (finished / "tasks/quiz.yaml").write_text("x")


def test_statistics_that_a_power_cut_has_damaged_are_made_again_and_a_card_costs_nothing(finished: Path) -> None:
    stats, card = finished / "results/x/urls/stats.json", finished / "results/x/run.json"
    kept = stats.read_bytes(), card.read_bytes()
    stats.write_bytes(bytes(len(kept[0])))
    card.write_bytes(b"")
    rules, output = plan(finished)
    stats.write_bytes(kept[0])
    card.write_bytes(kept[1])
    assert {"blacklist", "scrape"} <= rules and "ingest" not in rules
    assert "urls/stats.json: not valid JSON (binary data); blacklist makes it again\n" in output, output
    assert output.count("run.json: not valid JSON") == 1 and "Traceback" not in output, output


def test_a_changed_key_of_a_finished_model_is_refused_and_deleted_results_are_made_again(finished: Path) -> None:
    run = finished / "results/x"
    write_settings(Settings.model_validate(BASE), run / "models/tiny/settings.yaml")
    (finished / "other.yaml").write_text(yaml.safe_dump(with_overrides(BASE, ["models.tiny.train.lr=0.1"])))
    refused = snakemake(finished, "merge_tiny", "-n", "--configfile", "other.yaml")
    (run / "models/tiny/settings.yaml").unlink()
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error")]
    assert refused.returncode == 2 and "models.tiny: train.lr 0.00015 -> 0.1" in line
    for name in ("merged", "dataset"):
        (run / name).rename(run / f"{name}-away")
    rules, _ = plan(finished)
    for name in ("merged", "dataset"):
        (run / f"{name}-away").rename(run / name)
    assert rules == AFTER_DATASET | {"merge_index"}


UPDATE = {  # file below common/settings: what it has, and has in another version of the toolkit
    "corpus.py": {
        r"(?=    javascript_characters)": '    max_characters: int = 0\n    """No key has this."""\n',
        r"    max_pieces.*\n.*\n": "",
    },
    "sources.py": {r"(?=    text_key)": '    dialect: str = ""\n    """No key has this."""\n'},
    "training.py": {
        r"(?=    clip_grad)": '    z_loss: float = 0\n    """No key has this."""\n',
        r"    clip_grad.*\n.*\n": "",
        r"(?=    top_p)": '    min_p: float = 0\n    """No key has this."""\n',
        r"250_000": "9",
    },
}


def test_an_update_of_the_toolkit_repeats_exactly_the_steps_whose_keys_have_another_value(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Snakefile", tmp_path)
    (tmp_path / "workflow").symlink_to(ROOT / "workflow")
    for name, edits in UPDATE.items():
        path = tmp_path / "common/settings" / name
        for pattern, text in edits.items():
            edited, count = re.subn(pattern, text, path.read_text())
            assert count == 1, pattern
            path.write_text(edited)
    written = [finished / "results/x" / name for name in ("config.yaml", "models/tiny/settings.yaml")]
    for path in written:
        write_settings(Settings.model_validate(BASE), path)
    nothing = plan(finished, "evaluate.max_tokens=250000", code=tmp_path)
    rules, said = plan(finished, "generate.min_p=0.5", code=tmp_path)
    for path in written:
        path.unlink()
    assert "Nothing to be done" in nothing[1] and "settings changed" not in nothing[1], nothing[1]
    assert rules == {"evaluate", "generate", "report", "all"}, "another default and another value are changes"
    assert "evaluate.max_tokens 250000 -> 9\n  generate.min_p 0.0 -> 0.5\nruns again: evaluate, generate\n" in said, (
        said
    )


AFTER_DATASET = {"train", "merge", "evaluate", "generate", "report", "all"}
AFTER_CLEAN = {
    *("clean", "dedup_signatures", "dedup_signed", "dedup_bands_0", "dedup_verify_0", "dedup_clusters", "dedup"),
    *("repeats_count", "repeats_sum", "repeats", "decontaminate_count"),
    *("decontaminate_sum", "decontaminate", "train_tokenizer", "tokenize", "merge_index"),
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (("clean.language=no", "dedup.jobs=3"), AFTER_CLEAN | AFTER_DATASET),
        (("generate.prompt=x",), {"generate", "report", "all"}),
    ],
)
def test_snakemake_plans_what_comes_after_a_changed_key_and_nothing_else(
    finished: Path, changes: tuple[str, ...], expected: set[str]
) -> None:
    assert plan(finished, *changes)[0] == expected
