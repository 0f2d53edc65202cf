"""What a change does to a model that has been trained: every key, before any job."""

import json
import re
import shutil
import typing
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from common import steps
from common.config import load_settings, read_yaml, with_overrides, write_settings
from common.errors import CheckpointError, ConfigError, ToolkitError
from common.files import read_json
from common.settings import DataSettings, Experiment, Settings, SourceSettings
from common.settings.corpus import FastTextModel
from tests.training.helpers import byte_documents, write_corpus
from tests.workflow.pipeline import SNAKEMAKE, finish, planned, snakemake
from tests.workflow.pipeline import TINY as TINY_MODEL
from training import model_folder
from training.model_folder import is_end, is_finished
from workflow import trained
from workflow.trained import changed_keys, check_trained

# What a change of each key does to a run with a corpus alone, with a training that is half way, and
# with a finished one. The first pattern counts.
#
#     again      the corpus is made again
#     refused    before any job
#     goes on    the training continues from its checkpoint, with the new value
#     anew       steps after the training run again
#     -          nothing runs, or what would run without the change
OUTCOMES = """
    base shards site urls sources                                       again  refused  refused
    blacklist.*                                                         again  refused  refused
    scrape.obey_robots scrape.opt_out* scrape.max_* scrape.extractors   again  refused  refused
    scrape.* fetch.*                                                      -      goes_on  -
    dedup.ranges dedup.jobs *.memory_gb                                 -      goes_on  -
    clean.* dedup.* repeats.* decontaminate.* train_tokenizer.*         again  refused  refused
    tokenize.*                                                          again  refused  refused
    max_bad_share train_models cluster.* evaluate.batch                 -      goes_on  -
    evaluate.* generate.*                                               -      goes_on  anew
    models.tiny.model.dropout models.tiny.finetune                      -      goes_on  refused
    models.tiny.model.* models.tiny.data                                -      refused  refused
    models.tiny.train.seed models.tiny.train.split                      -      refused  refused
    models.tiny.train.optimizer                                         -      refused  refused
    models.tiny.train.iterations                                        -      goes_on  goes_on
    models.tiny.train.*micro_batch_size models.tiny.train.accumulation  -      goes_on  -
    models.tiny.train.recompute models.tiny.train.compile               -      goes_on  -
    models.tiny.train.attention models.tiny.train.loss                  -      goes_on  -
    models.tiny.train.kernels models.tiny.train.deterministic           -      goes_on  -
    models.tiny.train.readers models.tiny.train.profile*                -      goes_on  -
    models.tiny.train.*_interval models.tiny.train.eval_batches         -      goes_on  -
    models.tiny.train.sample_prompt models.tiny.train.async_save        -      goes_on  -
    models.tiny.train.keep_* models.tiny.train.allow_*                  -      goes_on  -
    models.tiny.train.*                                                 -      goes_on  refused
    models.tiny.parallel.* models.tiny.watch.* models.tiny.log.*        -      goes_on  -
    models.tiny.slurm.* models.tiny.time_limit_minutes                  -      goes_on  -
"""
ROWS = [(row.split()[:-3], row.split()[-3:]) for row in OUTCOMES.strip().splitlines()]
TINY, RUN = "models.tiny.", "results/x"
GIVEN = {  # keys whose other value the type does not tell
    "sources": [SourceSettings(path="others")],
    "clean.fasttext": [FastTextModel(path=Path("model.bin"), label="x")],
    "dedup.against": [Path("signatures")],
    "blacklist.domain_lists": [Path("domains")],
    "base": [Path("earlier")],
    "cluster.gpus": {},
    "train_models": [],
    "cluster.corpus.runtime_minutes": {"clean": 1},
    "repeats.units": ["paragraphs"],
    "scrape.extractors": ["resiliparse"],
    "decontaminate.files": ["another.txt"],
    "models.tiny.train.betas": (0.5, 0.5),
    "models.tiny.train.profile": (2, 3),
    "models.tiny.train.profile_ranks": [1],
}


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, type) of every key below a section, the models' below `models.tiny`."""
    for name, field in section.model_fields.items():
        kind = Experiment if name == "models" else field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, TINY if name == "models" else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def other(key: str, kind: Any, value: Any) -> Any:
    """Another value of a key."""
    if key in GIVEN:
        return GIVEN[key]
    if typing.get_origin(kind) is typing.Literal:
        return next(each for each in typing.get_args(kind) if each != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | str):
        return value + ("x" if isinstance(value, str) else 1)
    if isinstance(value, list):
        return [*value, "x"]
    return {"x": "y"} if isinstance(value, dict) else Path("other")


def with_value(section: Any, path: list[str], value: Any) -> Any:
    """A copy of a section with one other value; unchecked, because few values stand alone."""
    name, *rest = path
    if isinstance(section, dict):
        return {**section, name: with_value(section[name], rest, value)}
    inner = with_value(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})


def differs(name: str, then: Settings, now: Settings) -> bool:
    """Whether Snakemake repeats a step, by the settings in its params."""
    step = steps.named(name)
    configured = any(step in (*steps.configured(each), *steps.MODELS) for each in (then, now))
    return configured and steps.changed(*(steps.keys(name, each, "tiny") for each in (then, now)))


def outcome(then: Settings, now: Settings) -> str:
    """What `all` does with other settings; see OUTCOMES."""
    folder = now.model_folder("tiny")
    corpus = [step.name for step in steps.CORPUS if differs(step.name, then, now)] or changed_keys(then, now)
    going_on = folder.is_dir() and not ((folder / "done.json").is_file() and is_end(now.models["tiny"].train, 20, 0))
    training = {"tiny"} if corpus or going_on or differs("train", then, now) else set[str]()
    try:
        is_finished(now, "tiny")
        check_trained(now, training, set(corpus), corpus)
    except ToolkitError as error:
        assert len(str(error).splitlines()) == 1
        return "refused"
    if corpus or going_on:
        return "again" if corpus else "goes_on"
    return "anew" if folder.is_dir() and (differs("evaluate", then, now) or differs("generate", then, now)) else "-"


def unfinish(folder: Path, last: str = "iter_0000020") -> None:
    """Make a finished training one that was killed before its last checkpoint."""
    shutil.rmtree(folder / last)
    (folder / "done.json").unlink()


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A finished run with every optional step, `results/x`; `tiny` has trained 20 iterations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_folder, "load_settings", cache(load_settings))  # every key reads the same file
    shutil.copytree(tiny_run, RUN)
    settings = Settings.model_validate(
        json.loads(load_settings(tiny_run / "config.yaml").model_dump_json())
        | {
            "run": RUN,
            "sources": [{"path": "texts"}],
            "repeats": {"units": ["lines"]},
            "decontaminate": {"files": ["set.txt"]},
            "train_tokenizer": {"vocab_size": 257},
            "tokenize": {},
        }
    )
    write_settings(settings, settings.model_folder("tiny") / "settings.yaml")
    return settings


@pytest.mark.parametrize("state", [0, 1, 2], ids=["a corpus", "half way", "finished"])
def test_a_change_of_any_key_is_planned_refused_or_of_no_effect(run: Settings, state: int) -> None:
    folder, used = run.model_folder("tiny"), set[str]()
    if state == 0:
        shutil.rmtree(folder)
    elif state == 1:
        unfinish(folder)
    found, expected = dict[str, str](), dict[str, str]()
    for key, kind in leaves(Settings):
        if key == "run":
            continue
        path, value = key.split("."), run
        for part in path:
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        same_twice = [DataSettings(prefix=run.dataset_prefix, weight=1)] * 2
        now = with_value(run, path, same_twice if key == f"{TINY}data" else other(key, kind, value))
        pattern, expected[key] = next(
            ((each, row[state]) for patterns, row in ROWS for each in patterns if fnmatchcase(key, each)),
            ("", "no row"),
        )
        used.add(pattern)
        found[key] = outcome(run, now)
    assert found == expected, "a new key needs a row"
    assert used == {pattern for patterns, _ in ROWS for pattern in patterns}, "a row without a key"


def test_a_refusal_names_the_keys_the_models_and_what_each_way_costs(run: Settings) -> None:
    shutil.copytree(run.model_folder("tiny"), run.model_folder("copy"))
    now = with_value(with_value(run, ["clean", "min_characters"], 9), ["generate", "prompt"], "x")
    with pytest.raises(ConfigError) as refused:  # no model is trained: another target
        check_trained(now, [], {"clean"}, ["clean"])
    assert str(refused.value) == (
        "results/x: clean.min_characters 512 -> 9 would make another corpus than the one that copy and tiny was "
        "trained on, and training never goes on with other data. Set it back; or choose another `run`: with "
        "`base: [results/x]` it adds new documents to this corpus, without it everything is made again; or move "
        "results/x/models/copy and results/x/models/tiny away: then the corpus is replaced, and training starts "
        "from scratch"
    )
    with pytest.raises(ConfigError, match=r"^results/x: other input of ingest would make another corpus"):
        check_trained(run, ["tiny"], {"ingest", "clean"}, ["ingest"])
    check_trained(run, ["tiny"], {"ingest", "clean"}, [])  # the same settings make the same bytes
    check_trained(run, ["tiny"], set(), [])


def test_a_model_is_kept_only_with_the_data_that_it_was_trained_on(run: Settings) -> None:
    """A corpus that was replaced may be made again as it was; a missing one, too."""
    now, prefix = with_value(run, ["clean", "min_characters"], 9), run.dataset_prefix
    elsewhere = prefix.with_name("elsewhere")
    write_corpus(prefix, byte_documents(50))
    check_trained(now, [], {"clean"}, ["clean"])  # nothing to lose, and no training that would refuse
    check_trained(run, ["tiny"], {"clean"}, ["clean"])
    for suffix in (".bin", ".idx", ".json"):
        prefix.with_name(prefix.name + suffix).rename(elsewhere.with_name(elsewhere.name + suffix))
    check_trained(run, ["tiny"], {"tokenize"}, [])
    for each in (now, with_value(run, ["shards"], 9)):
        with pytest.raises(ConfigError, match="another corpus than the one that tiny was trained on"):
            check_trained(each, ["tiny"], {"clean"}, [])
    own = with_value(now, ["models", "tiny", "data"], [DataSettings(prefix=elsewhere, weight=1)])
    with pytest.raises(
        CheckpointError, match=r"was trained on another dataset than .*elsewhere holds now; restore it, "
    ):
        check_trained(own, ["tiny"], {"clean"}, ["clean"])


def test_a_corpus_with_tombstones_is_kept_even_if_no_setting_has_changed(
    run: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained, "has_tombstones", lambda prefix: prefix == run.dataset_prefix)
    check_trained(run, [], {"ingest"}, [])
    with pytest.raises(ConfigError, match="tokenize, which leaves no tombstones of the documents that were removed"):
        check_trained(run, [], {"ingest", "tokenize"}, [])


def test_a_second_model_needs_nothing_of_the_first(run: Settings) -> None:
    models = {**run.models, "more": run.models["tiny"]}
    now = run.model_copy(update={"models": models, "train_models": ["more"]})
    check_trained(now, ["more"], set(), [])
    assert is_finished(now, "tiny") and not is_finished(now, "more")


def test_a_run_under_another_name_keeps_its_models(run: Settings) -> None:
    moved = run.model_copy(update={"run": Path("results/y")})
    run.run.rename(moved.run)
    moved = moved.model_copy(update={"sources": [SourceSettings(path="results/y/texts")]})
    write_settings(
        with_value(run, ["sources"], [SourceSettings(path=f"{RUN}/texts")]),
        moved.model_folder("tiny") / "settings.yaml",
    )
    check_trained(moved, ["tiny"], {"clean"}, [])


CORPUS_OF_TINY = ("dataset/*", "tokens/*", "clean/*", "config.yaml", "models/tiny/*/*")


def content(folder: Path) -> dict[Path, bytes]:
    """Every file that a refused change must leave as it is."""
    return {path: path.read_bytes() for name in CORPUS_OF_TINY for path in (folder / RUN).glob(name) if path.is_file()}


def changed(folder: Path, *changes: str) -> tuple[str, str]:
    """The options that read the configuration with these changes."""
    config = with_overrides(read_yaml(folder / "config.yaml"), changes)
    (folder / "changed.yaml").write_text(yaml.safe_dump(config))
    return "--configfile", "changed.yaml"


def refusal(folder: Path, *arguments: str) -> str:
    """The line with which Snakemake ends before any job."""
    before, ended = content(folder), snakemake(folder, *arguments)
    assert ended.returncode == 2 and content(folder) == before, ended.stdout + ended.stderr
    assert "Job stats" not in ended.stdout + ended.stderr and "settings changed" not in ended.stderr, "no plan"
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error")]
    return line


def done_as_planned(folder: Path, *arguments: str) -> set[str]:
    """The rules that Snakemake has run, which are those that it had planned."""
    jobs, _ = planned(folder, *arguments)
    output = finish([*SNAKEMAKE, "--cores", "2", *arguments], folder)
    done = set(re.findall(r"^(?:local)?rule (\w+):", output, re.MULTILINE))
    assert done == jobs.keys() - {"total"}, output
    return done - {"all"}


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, with its working folder."""
    return shutil.copytree(finished_run, tmp_path / "copy", symlinks=True)


FILTER = "clean.min_characters=2470"  # drops some documents
AFTER = {"merge", "evaluate", "generate", "report"}


@pytest.mark.xdist_group("finished_run")
def test_a_plan_that_would_change_the_corpus_of_a_model_is_one_line(folder: Path) -> None:
    line = refusal(folder, "all", "-n", "--quiet", *changed(folder, FILTER))
    assert line.startswith("error: results/x: clean.min_characters 512 -> 2470 would make another corpus than the one")


@pytest.mark.slow  # these and the next two take 3 minutes of CPU
@pytest.mark.xdist_group("finished_run")
def test_no_target_changes_the_corpus_of_a_model(folder: Path) -> None:
    for target in ("all", "merge_tiny", "dataset", "corpus"):
        assert "clean.min_characters 512 -> 2470 would" in refusal(folder, target, *changed(folder, FILTER)), target
    for change in ("blacklist.min_length=20", "tokenize.append_eod=false", "dedup.threshold=0.9", "site=other"):
        shutil.copytree(folder / "site", folder / "other", dirs_exist_ok=True)
        key = change.partition("=")[0]
        assert f"error: results/x: {key} " in refusal(folder, "all", "-n", *changed(folder, change)), change
    urls = folder / "site/urls.txt"
    kept = urls.read_bytes()
    urls.write_bytes(kept + b"http://new.example/page\n")
    assert "other input of blacklist would make another corpus" in refusal(folder, "all", "-n")
    urls.write_bytes(kept)
    assert not planned(folder, "all", *changed(folder, FILTER), "--rerun-triggers", "mtime")[0]
    finish([*SNAKEMAKE, "all", *changed(folder, FILTER), "--touch", "--forceall"], folder)
    assert not planned(folder, "all", *changed(folder, FILTER))[0], "--touch keeps the corpus as it is"


@pytest.mark.slow
@pytest.mark.xdist_group("finished_run")
def test_what_is_planned_of_a_finished_run_happens(folder: Path) -> None:
    dataset, model = folder / RUN / "dataset/corpus_text_document.bin", folder / RUN / "models/tiny"
    tokens = dataset.read_bytes()
    harmless = ("dedup.memory_gb=9", "cluster.max_restarts=9", "models.tiny.train.keep_last=9", "scrape.retries=9")
    assert not planned(folder, "all", *changed(folder, *harmless))[0]
    assert done_as_planned(folder, "all", *changed(folder, "generate.prompt=It")) == {"generate", "report"}
    change = ("generate.prompt=It", "evaluate.max_tokens=1000")
    assert done_as_planned(folder, "all", *changed(folder, *change)) == {"evaluate", "report"}
    again = done_as_planned(folder, "all", *changed(folder, *change), "-R", "clean")
    assert {"clean", "tokenize", "merge_index", "train", *AFTER} <= again
    shutil.rmtree(dataset.parent)
    assert done_as_planned(folder, "all", *changed(folder, *change)) == {"merge_index", "train", *AFTER}
    assert dataset.read_bytes() == tokens and read_json(model / "done.json")["iteration"] == 12
    change = (*change, "models.tiny.train.iterations=14")
    assert done_as_planned(folder, "all", *changed(folder, *change)) == {"train", *AFTER}
    assert read_json(model / "done.json")["iteration"] == 14
    second = {"model": TINY_MODEL["model"], "train": {"iterations": 2}}
    change = (*change, f"models.second={json.dumps(second)}", "train_models=[tiny, second]")
    assert done_as_planned(folder, "all", *changed(folder, *change)) == {"train", *AFTER}
    assert "models.tiny: train.lr 0.01 -> 1" in refusal(
        folder, "all", *changed(folder, *change, "models.tiny.train.lr=1")
    )


@pytest.mark.slow
@pytest.mark.xdist_group("finished_run")
def test_a_training_that_is_half_way_goes_on_with_its_corpus_alone(folder: Path) -> None:
    dataset, model = folder / RUN / "dataset/corpus_text_document.bin", folder / RUN / "models/tiny"
    tokens = dataset.read_bytes()
    unfinish(model, "iter_0000012")
    assert "train.seed is 9 in the con" in refusal(folder, "all", "-n", *changed(folder, "models.tiny.train.seed=9"))
    assert "clean.min_characters 512 -> 2470 would" in refusal(folder, "all", "-n", *changed(folder, FILTER))
    model.rename(folder / "away")
    assert {"clean", "train"} < done_as_planned(folder, "train_tiny", *changed(folder, FILTER))
    assert dataset.read_bytes() != tokens
    shutil.rmtree(model)
    (folder / "away").rename(model)
    assert "was trained on another dataset than" in refusal(folder, "all", "-n", *changed(folder, FILTER))
    assert {"clean", "train", *AFTER} < done_as_planned(folder, "all", *changed(folder, "models.tiny.train.lr=0.02"))
    assert dataset.read_bytes() == tokens, "the model's own settings make its corpus again"
    assert read_json(model / "done.json")["iteration"] == 12
