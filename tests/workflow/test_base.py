"""A run that extends finished ones: what it leaves out, must match, and never touches."""

import sys
from pathlib import Path

import orjson
import pytest
import yaml

from cluster.status import overview
from common.config import load_settings, write_settings
from common.errors import InputError
from common.files import fingerprint, read_lines, write_json
from common.settings import BlacklistSettings, Settings, SourceSettings
from corpus.blacklist import blacklist
from corpus.ingest import ingest
from tests.helpers import document, prose, read_rejects, read_shard, write_shard
from tests.workflow.pipeline import DATASET, SNAKEMAKE, TINY, configure, finish, planned, snakemake
from workflow import redone
from workflow.report.__main__ import render
from workflow.report.funnel import funnel


def test_urls_of_earlier_runs_are_known_in_any_spelling(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("http://example.org/a\nhttp://example.org/b\n")
    listed = "https://www.example.org/b#x\nhttp://example.org/c\n" * 2 + "http://x.example/a.jpg"
    (tmp_path / "list.txt").write_text(listed)
    rejects, known = tmp_path / "rejects.jsonl", [tmp_path / "old.txt"]
    stats = blacklist([tmp_path / "list.txt"], [tmp_path / "out.txt"], BlacklistSettings(), known, rejects=rejects)
    assert (tmp_path / "out.txt").read_text() == "http://example.org/c\n"
    reasons = [orjson.loads(line)["reason"] for line in read_lines(rejects)]
    assert reasons == ["known", "known", "duplicate", "extension"]
    assert stats.documents_in == 5 and dict(stats.reasons) == {"known": 2, "duplicate": 1, "extension": 1}


def test_files_of_earlier_runs_are_left_out_and_one_that_has_changed_is_an_error(tmp_path: Path) -> None:
    sources = [SourceSettings(path=str(tmp_path / "texts"))]
    old = write_shard(tmp_path / "texts/a.jsonl", [document(1, "old")])
    write_json(tmp_path / "stats.json", {"inputs": {str(old): fingerprint(old)}})
    write_shard(tmp_path / "texts/b.jsonl", [document(2, "new")])
    stats = ingest(sources, [tmp_path / "out.jsonl"], [tmp_path / "stats.json"])
    assert [found["text"] for found in read_shard(tmp_path / "out.jsonl")] == ["new"]
    assert stats.extra["known_files"] == 1 and [*stats.extra["inputs"]] == [str(old), f"{tmp_path}/texts/b.jsonl"]
    write_shard(old, [document(1, "newer")])
    with pytest.raises(InputError, match=r"a\.jsonl: changed since .*another name"):
        ingest(sources, [tmp_path / "out.jsonl"], [tmp_path / "stats.json"])


def finished(run: Path, **more: object) -> Settings:
    """The settings of a run that seems finished."""
    settings = Settings.model_validate({"run": run, "sources": [{"path": "x"}], **more})
    write_settings(settings, run / "config.yaml")
    for name in ("ingest", "dataset"):
        write_json(run / name / "stats.json", {})
    return settings


def test_a_model_is_trained_on_all_parts_by_their_size_unless_it_names_its_data(tmp_path: Path) -> None:
    models = {"tiny": {"model": {"n_layer": 1, "n_head": 1, "n_embd": 8}, "train": {"iterations": 1}}}
    settings = finished(tmp_path / "new", base=tmp_path / "old", models=models)
    prefixes = [tmp_path / run / "dataset/corpus_text_document" for run in ("old", "new")]
    assert [data.prefix for data in settings.datasets("tiny")] == prefixes
    for prefix, size in zip(prefixes, (9_000_000, 1_000_000), strict=True):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        prefix.with_name("corpus_text_document.bin").write_bytes(bytes(size))
    assert [data.weight for data in settings.datasets("tiny")] == [9000, 1000]
    alone = finished(tmp_path / "new", models=models)
    assert [(data.prefix, data.weight) for data in alone.datasets("tiny")] == [(prefixes[1], 1)]


def test_a_changed_setting_is_told_with_what_runs_again_and_what_stays(tmp_path: Path) -> None:
    before = finished(tmp_path)
    assert redone.describe(before, ["clean"]) == ""
    for name in ("pages/0000.jsonl.zst.journal", "models/tiny/iter_0000010/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    now = Settings.model_validate({**before.model_dump(), "clean": {"min_characters": 600}})
    assert redone.describe(now, ["clean", "clean", "dedup_bands_0", "dedup_clusters", "merge_index"]) == (
        f"{tmp_path}: settings changed since it was started last\n"
        "  clean.min_characters 512 -> 600\n"
        "runs again: clean (2 jobs), dedup_clusters (2 jobs), merge_index\n"
        "stays: 1 journals of fetched pages, checkpoints of tiny"
    )
    assert "\nruns: clean, train\nstays" in redone.describe(now, [], ["clean", "train"])  # after a start that failed
    assert "\nruns again: nothing\n" in redone.describe(now, [])
    of_another_version = (tmp_path / "config.yaml").read_text().replace("train_models: null", "train_models: []")
    (tmp_path / "config.yaml").write_text(of_another_version.replace("threshold: 0.7", "threshold: 0.6"))
    assert redone.describe(before, []) == "", "other defaults"
    assert redone.describe(now, []).count("->") == 1


def state(run: Path) -> dict[Path, tuple[int, bytes]]:
    """Time and content of every file of a run."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}


@pytest.mark.slow  # two runs of Snakemake, two trainings and two removals take 40 s of CPU
def test_a_second_delivery_is_processed_alone_the_first_keeps_every_byte_and_removals_repeat_only_training(
    tmp_path: Path,
) -> None:
    """Document 3 displaces 900, which stays out after 3 is removed; 901 is a copy of document 4."""
    near = document(900, f"{prose(3)} And a last sentence that the old page had not.")
    first, second = ([document(n, prose(n)) for n in numbers] for numbers in (range(20), range(20, 30)))
    write_shard(tmp_path / "texts/a.jsonl", first)
    common = {"urls": [], "site": None, "sources": [{"path": "texts"}], "models": {"tiny": {**TINY, "parallel": {}}}}
    configure(tmp_path, **common)
    finish(DATASET, tmp_path)
    old = state(tmp_path / "results/x")
    write_shard(tmp_path / "texts/b.jsonl", [*second, near, document(901, prose(4))])
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config |= {"run": "results/y", "base": "results/x", "shards": 3}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    finish(DATASET, tmp_path)
    assert state(tmp_path / "results/x") == old
    steps = {step.name: step.documents_out for step in funnel(tmp_path / "results/y")}
    assert steps == {"ingest": 12, "clean": 12, "dedup": 10, "tokenize": 10, "merge_index": 10}
    removed = [each for path in tmp_path.glob("results/y/dedup/removed/*") for each in read_rejects(path)]
    assert {each["url"][-3:] for each in removed} == {"900", "901"}
    assert load_settings(tmp_path / "results/y/config.yaml").base == [Path("results/x")]
    assert "It extends results/x." in render(tmp_path / "results/y")
    assert "results/y extends results/x:" in overview([tmp_path / "results/y"], [])[0]
    assert "Nothing to be done" in planned(tmp_path, "dataset")[1]
    result = snakemake(tmp_path, "dataset", "-n", "--config", "dedup={bands: 21}")
    assert result.returncode == 2 and "dedup.bands" in result.stdout + result.stderr
    _, said = planned(tmp_path, "dataset", "--config", "clean={min_characters: 600}")
    assert "clean.min_characters 512 -> 600" in said and "runs again: clean (3 jobs), dedup_signatures (3 jobs)" in said

    train = (*SNAKEMAKE, "train_tiny", "--quiet", "host")
    finish(train, tmp_path)
    remove = (sys.executable, "-m", "workflow.provenance.remove", "--urls", "leaving", "--by", "Ada", "--yes", "--run")
    (tmp_path / "leaving").write_text(second[5]["url"])
    finish((*remove, "results/y"), tmp_path)
    dataset = {path: path.read_bytes() for path in (tmp_path / "results/y/dataset").glob("*document*")}
    (tmp_path / "leaving").write_text(first[3]["url"])
    finish((*remove, "results/x", "--model", "results/y/models/tiny"), tmp_path)
    assert set(planned(tmp_path, "train_tiny")[0]) == {"train", "train_tiny", "total"}
    finish(train, tmp_path)
    assert "Nothing to be done" in planned(tmp_path, "train_tiny")[1]
    assert {path: path.read_bytes() for path in dataset} == dataset
    assert "README.md" in finish((sys.executable, "-m", "workflow.cards", "--run", "results/y"), tmp_path)
