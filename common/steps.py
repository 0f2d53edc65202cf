"""The steps of the pipeline: their results, the settings that decide these, their statistics.

One table for the rules, their reruns, the report, `cluster.status` and the demo's summary. A new
step is a row here, a module, a rule in workflow/rules/ and, if it has settings, a section in
common/settings/corpus.py.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from common.files import find_inputs, read_json, shard_paths
from common.settings import GenerateSettings, Settings, changes, names


@dataclass(frozen=True)
class Step:
    """A step of the pipeline."""

    name: str
    """The name of its rule and log, in status and in the report."""
    folder: str
    """Below the run."""
    file: str
    """The result, with {shard} or {model} if there is one for each. Written atomically."""
    unit: str = ""
    """The unit of its statistics; empty if they are not in the report's funnel."""
    keys: tuple[str, ...] = ()
    """Settings that the result depends on: a change repeats the step. Not inputs from other steps,
    nor keys that change no result: time-outs, memory, workers, logging."""
    omitted: tuple[str, ...] = ()
    """Keys of those sections that change no result."""
    needs: str = ""
    """The step runs only if this key is set."""
    parts: tuple[str, ...] = ()
    """Other rules that count as this step."""

    @property
    def pattern(self) -> str:
        """The path of the result below the run."""
        return f"{self.folder}/{self.file}".lstrip("/")

    @property
    def rejects(self) -> str:
        """The path of the dropped documents below the run."""
        return f"{self.folder}/rejects/{'{shard}' if '{shard}' in self.file else 'all'}.jsonl.zst"

    @property
    def stats(self) -> str:
        """The path of the statistics below the run."""
        return f"{self.folder}/{'{shard}.' if '{shard}' in self.file else ''}stats.json"

    def runs(self, settings: Settings) -> bool:
        """Whether a configuration asks for this step."""
        return not self.needs or bool(_value(settings, self.needs))

    def statistics(self, run: Path, shards: int | None = None) -> Iterator[Path]:
        """The statistics that exist, of the first `shards` shards or of all."""
        paths = sorted((run / self.folder).glob("*stats.json"))
        if shards is not None:  # an earlier configuration may have had more
            paths = [run / self.folder / "stats.json", *shard_paths(run / self.folder, shards, ".stats.json")]
        yield from filter(Path.is_file, paths)

    def figures(self, run: Path, shards: int | None = None) -> Iterator[dict[str, Any]]:
        """The content of these statistics. Raises InputError for a damaged file."""
        for path in self.statistics(run, shards):
            yield read_json(path, f"delete it to count without it, or make it again: snakemake -R {self.name}")


_DOCUMENTS = "{shard}.jsonl.zst"
CORPUS = (
    Step("blacklist", "urls", "stats.json", "URLs", keys=("blacklist",), needs="urls"),
    Step(
        *("scrape", "pages", _DOCUMENTS, "pages"),
        # what changes a page's text, not how it is fetched; URL rules also judge redirects
        keys=(
            *("scrape.extractors", "scrape.max_bytes", "scrape.max_redirects", "scrape.obey_robots"),
            *("scrape.opt_outs", "scrape.opt_out_directives", "blacklist"),
        ),
        omitted=("blacklist.min_score", "blacklist.over_18", "blacklist.self_posts"),
        needs="urls",
    ),
    Step("fetch", "fetch", "stats.json", needs="remote_sources"),
    Step(
        *("ingest", "ingest", "stats.json", "documents"),
        keys=("sources",),
        omitted=("sources.keep", "sources.anonymous"),
        needs="sources",
    ),
    Step("clean", "clean", _DOCUMENTS, "documents", keys=("clean",)),
    Step(
        *("dedup_signatures", "dedup/work", "{shard}.signatures"),
        keys=("dedup.shingle_characters", "dedup.shingle_words", "dedup.bands", "dedup.rows", "dedup.seed"),
    ),
    Step(
        *("dedup_clusters", "dedup", "clusters.json"),
        keys=("dedup.threshold", "dedup.against"),
        parts=("dedup_bands", "dedup_verify"),
    ),
    Step("dedup", "dedup", _DOCUMENTS, "documents"),
    Step(
        *("repeats_count", "repeats/work", "{shard}.units"),
        keys=("repeats.units", "repeats.min_bytes"),
        needs="repeats.units",
    ),
    Step("repeats_sum", "repeats", "all.repeats", keys=("repeats.max_count",), needs="repeats.units"),
    Step(
        *("repeats", "repeats", _DOCUMENTS, "documents"),
        keys=("repeats.keep_first", "repeats.min_characters"),
        needs="repeats.units",
    ),
    Step(
        *("decontaminate_count", "decontaminate", "{shard}.counts.json"),
        keys=("decontaminate.min_words", "decontaminate.max_words"),
        needs="decontaminate.files",
        parts=("decontaminate_sum",),
    ),
    Step(
        *("decontaminate", "decontaminate", _DOCUMENTS, "documents"),
        keys=("decontaminate",),
        omitted=("decontaminate.files",),
        needs="decontaminate.files",
    ),
    Step(
        *("train_tokenizer", "tokenizer", "stats.json"), keys=("train_tokenizer",), needs="train_tokenizer.vocab_size"
    ),
    Step(
        *("tokenize", "tokens", "{shard}_text_document.idx", "documents"),
        keys=("tokenize.min_tokens", "tokenize.append_eod"),
    ),
    Step("merge_index", "dataset", "stats.json", "documents"),
)
MODELS = (
    Step("train", "models", "{model}/done.json", keys=("models.{model}.recipe",)),
    Step("merge", "merged", "{model}/config.json"),
    Step("evaluate", "evaluation", "{model}.json", "", ("models.{model}.train.split", "evaluate"), ("evaluate.batch",)),
    Step("generate", "samples", "{model}.txt", keys=tuple(f"generate.{key}" for key in GenerateSettings.model_fields)),
)
_BY_NAME = {step.name: step for step in (*CORPUS, *MODELS)}
_BY_RULE = {part: step.name for step in CORPUS for part in step.parts}
JOBS = sorted({*_BY_NAME, *_BY_RULE, "demo_site", "report", "cards"} - {"train"})
"""The rules whose jobs `cluster.corpus` configures by name."""


def named(name: str) -> Step:
    """The step of this name."""
    return _BY_NAME[name]


def result(name: str, run: Path, model: str = "") -> Path:
    """The result of a step that has one for the run, or one for each model."""
    return run / named(name).pattern.format(model=model)


def of_rule(rule: str) -> str:
    """The name of the step that a rule is a part of: dedup_clusters for dedup_bands_3."""
    return _BY_RULE.get(rule_key(rule), rule_key(rule))


def rule_key(rule: str) -> str:
    """The name of a rule in the configuration: dedup_bands for dedup_bands_3."""
    return re.sub(r"_\d+$", "", rule)


def configured(settings: Settings) -> list[Step]:
    """The corpus steps of a configuration, in their order; none if all models bring their data."""
    return [step for step in CORPUS if step.runs(settings)] if settings.urls or settings.sources else []


def keys(name: str, settings: Settings, model: str = "") -> dict[str, Any]:
    """The settings that a step's results depend on, as plain data, for Snakemake to compare.

    "given" names those that differ from their default: see `changed`.
    """
    values, given = dict[str, Any](), dict[str, Any]()
    sparse = settings.model_dump(mode="json", exclude_defaults=True)
    for step in [named(name), *([named("scrape")] if name == "ingest" and settings.has_pages else [])]:
        for key in step.keys:
            path, last = key.format(model=model), key.rpartition(".")[2]
            value = to_jsonable_python(_value(settings, path))
            values[last] = _without(value, key, step.omitted)
            with suppress(KeyError):  # it is the default
                given[last] = _value(sparse, path.removesuffix(".recipe"))
    return {**values, "given": sorted({*names(values)} & {*names(given)})}


def _without(value: Any, key: str, omitted: Sequence[str]) -> Any:
    """Settings, also a list of them, without the keys in `omitted`."""
    if isinstance(value, list):
        return [_without(each, key, omitted) for each in value]
    if not isinstance(value, dict):
        return value
    return {inner: each for inner, each in value.items() if f"{key}.{inner}" not in omitted}


def changed(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether `keys` of a step, perhaps of two versions of the toolkit, ask for different results.

    A key that only one version has counts if it is not at its default. Without "given", all count.
    """
    given = {name for each in (then, now) for name in each.get("given", names(each))}
    return bool(changes({**then, "given": None}, {**now, "given": None}, given))


def _value(settings: Settings | dict[str, Any], key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def read_by(rule: str, settings: Settings) -> list[Path]:
    """The files outside the run that `blacklist` or `ingest` reads; none for other rules."""
    lists = settings.urls if rule == "blacklist" else []
    paths = [path for pattern in lists for path in find_inputs(pattern, "lists")[0]]
    paths += [path for source in settings.local_sources if rule == "ingest" for path in source.files]
    return [path for path in paths if not path.is_relative_to(settings.run)]
