"""Checks before any job, so that no run fails after hours for a reason known at its start.

`check_parsed` runs when the Snakefile is parsed, the others when a job that needs them is planned.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import steps
from common.errors import ConfigError, InputError, ToolkitError
from common.files import REMOVED_IDS, read_json, sha256, shard_paths
from common.settings import Settings, TokenizeSettings, closest
from common.tokenizer import Tokenizer
from common.vocabulary import vocabulary_files
from corpus.sources.preview import preview
from training.dataset import epochs
from training.huggingface.config import check_finetune
from training.metrics.boards import check_boards
from training.model_folder import is_finished, newest_iteration
from training.planning.elastic import describe_counts, process_counts
from training.planning.fit import prepare
from training.planning.machines import machine
from workflow.runs import load_run, note_once, read_takedown


def check_parsed(settings: Settings) -> None:
    """Check what every target of the run needs. Raises ToolkitError."""
    check_run(settings)
    check_crawl(settings)
    check_takedown(settings)
    check_base(settings)
    check_names(settings)
    check_files(settings)


def check_run(settings: Settings) -> None:
    """Raise ConfigError if the run is no folder, or cannot become one."""
    run = settings.run
    nearest = next(path for path in (run, *run.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise ConfigError(f"run: {run}: {nearest} is not a folder; name another one")
    if nearest != run:
        try:  # permissions alone do not tell: root may write to /sys, where no folder can be made
            TemporaryDirectory(dir=nearest).cleanup()
        except OSError as error:
            raise ConfigError(f"run: {run}: cannot be made in {nearest}: {error.strerror}; name another one") from None


def crawl_layout(settings: Settings) -> Path:
    """The file with the pages' number of shards; beside them, so that it moves with them."""
    return settings.run / steps.named("scrape").folder / "layout.json"


def check_crawl(settings: Settings) -> None:
    """Raise ConfigError if the run has pages that were crawled with another number of shards.

    All URLs of a host go to one shard: with another number, every page would be fetched again.
    """
    layout = crawl_layout(settings)
    if settings.urls and layout.is_file() and any(path != layout for path in layout.parent.iterdir()):
        cure = f"delete it if the pages were crawled with `shards: {settings.shards}`: snakemake writes it again"
        shards = read_json(layout, cure)["shards"]
        if shards != settings.shards:
            raise ConfigError(
                f"{layout.parent} holds a crawl in {shards} shards, and with `shards: {settings.shards}` every URL of "
                f"it would be fetched again; set `shards: {shards}`, or move {layout.parent} away to crawl again"
            )


def check_takedown(settings: Settings) -> None:
    """Raise ConfigError if a removal of documents was not finished."""
    for record in sorted((settings.run / REMOVED_IDS.parent).glob("*.json")):
        if read_takedown(record)["state"] != "done":
            raise ConfigError(
                f"{record}: not finished; python -m workflow.provenance.remove --run {settings.run} --yes finishes it"
            )


def check_base(settings: Settings) -> None:
    """Raise ConfigError if a run of `base` is missing, unfinished, or has another vocabulary."""
    for run in settings.base:
        if run == settings.run:
            raise ConfigError(f"base: {run} is this run itself; choose another folder for `run`")
        if not (run / "config.yaml").is_file():
            raise ConfigError(f"base: {run}: no run there; name the folder of a finished run")
        then = load_run(run)
        for step in steps.configured(then):
            if step.name in ("blacklist", "ingest", "merge_index") and not steps.result(step.name, run).is_file():
                raise ConfigError(f"base: {run}: {step.pattern} is missing; finish that run first: snakemake dataset")
        if missing := [str(path) for path in then.base if path not in settings.base]:
            raise ConfigError(f"base: {run} extends {', '.join(missing)}; name that run, too, before {run}")
        for (key, old, content), (_, new, now) in zip(_shared(then), _shared(settings), strict=True):
            if content != now:
                raise ConfigError(f"{key} is {new}, but {run}, which this run extends, has {old}; make them equal")


def _shared(settings: Settings) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, content) of what all runs of a corpus share: signatures, one vocabulary."""
    for key in steps.named("dedup_signatures").keys:
        value = getattr(settings.dedup, key.removeprefix("dedup."))
        yield key, value, value
    yield "tokenize.append_eod", settings.tokenize.append_eod, settings.tokenize.append_eod
    for key in ("encoder_json", "vocab_bpe"):
        path = getattr(settings.tokenize, key)
        yield f"tokenize.{key}", path or "GPT-2's", sha256(path) if path and path.is_file() else path


def check_names(settings: Settings) -> None:
    """Raise ConfigError for a rule or a kind of GPU that does not exist."""
    for key in ("runtime_minutes", "partitions"):
        for rule in getattr(settings.cluster.corpus, key):
            if rule not in steps.JOBS:
                hint = closest(rule, steps.JOBS) or f"; the rules: {', '.join(steps.JOBS)}"
                raise ConfigError(f"cluster.corpus.{key}: no rule {rule!r}{hint}")
    for cluster in (settings.cluster, *map(settings.cluster_of, settings.models)):
        if cluster.gpu:
            machine(cluster.gpu, cluster.gpus)


def check_files(settings: Settings) -> None:
    """Open the lists and vocabularies that the corpus settings name.

    Files that the run makes itself may not exist yet. Raises ToolkitError.
    """
    if settings.blacklist.domain_lists:
        from corpus.urls.domain_lists import DomainBlocklist  # takes a third of a second

        DomainBlocklist(settings.blacklist)
    if settings.remote_sources:
        from corpus.remote.listing import check_extras  # takes half a second

        check_extras(settings)
    _own_tokenizer(settings)


def check_sources(settings: Settings) -> None:
    """Raise InputError if `ingest` would refuse a source outside the run, unless it is finished."""
    if _is_ingested(settings):
        return
    results = [steps.result("ingest", run) for run in settings.base]
    known = {os.path.abspath(name) for path in results if path.is_file() for name in read_json(path)["inputs"]}
    outside = [source for source in settings.sources if not Path(source.path).is_relative_to(settings.run)]
    share = settings.max_bad_share if outside == settings.sources else None
    preview(outside, share, known)


def _is_ingested(settings: Settings) -> bool:
    """Whether `ingest` has read the sources as they are now."""
    stats = steps.result("ingest", settings.run)
    try:
        if not stats.is_file() or load_run(settings.run).sources != settings.sources:
            return False
        inputs = {Path(name): (then["size"], then["mtime_ns"]) for name, then in read_json(stats)["inputs"].items()}
    except (ToolkitError, KeyError):  # damaged
        return False
    read = {path: then for path, then in inputs.items() if not path.is_relative_to(settings.run)}
    now = {path: path.stat() for path in steps.read_by("ingest", settings)}
    return read == {path: (status.st_size, status.st_mtime_ns) for path, status in now.items()}


def check_evaluation(settings: Settings) -> None:
    """Raise ConfigError if lm_eval is missing, or the folder of its tasks holds none."""
    folder = settings.evaluate.task_dir
    if folder and not any(folder.rglob("*.yaml")):
        raise ConfigError(f"evaluate.task_dir: {folder}: holds no YAML file; name the folder with the tasks' files")
    if settings.evaluate.tasks and find_spec("lm_eval") is None:
        raise ConfigError("evaluate.tasks needs lm_eval; pip install 'urls-to-gpt2[eval]'")


def _own_tokenizer(settings: Settings) -> Tokenizer | None:
    """The given tokenizer; None if the run trains one. Raises InputError for damaged files."""
    return None if settings.train_tokenizer.vocab_size else _read_tokenizer(settings.tokenize)


@cache  # every model asks
def _read_tokenizer(tokenize: TokenizeSettings) -> Tokenizer:
    tokenizer = Tokenizer(vocabulary_files(tokenize.encoder_json, tokenize.vocab_bpe))
    if tokenize.encoder_json:
        _ = tokenizer.vocabulary  # reads the files
    return tokenizer


def check_choice(settings: Settings) -> None:
    """Raise ConfigError if `all` cannot know what to train; print a note if it trains none."""
    names = list(settings.models)
    if settings.train_models is None and len(names) > 1:
        raise ConfigError(
            f"several models ({', '.join(names)}) and no train_models: set `train_models: [{names[0]}]` in the "
            f"configuration, or use the target train_{names[0]} instead of all"
        )
    if names and not settings.models_of_all:
        note_once(f"train_models is []: all trains no model; configured: {', '.join(names)}")


def check_model(settings: Settings, name: str) -> None:
    """Check what training needs besides data: memory, vocabulary, initial weights, W&B.

    If the data are there already, a note says whether they would be read too often.

    Raises ToolkitError, also if the model is finished with other settings.
    """
    if is_finished(settings, name):
        return
    model, tokenizer = settings.models[name], _own_tokenizer(settings)
    settings = prepare(settings, name)
    counts = process_counts(name, settings.models[name], settings.cluster_of(name))
    if len(counts) > 1:
        note_once(f"models.{name}: {describe_counts(counts)}, by cluster.min_nodes")
    if tokenizer and not model.data and model.model.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"models.{name}.model.vocab_size is {model.model.vocab_size}, but the vocabulary of the corpus has "
            f"{tokenizer.vocab_size} tokens; make them equal, or set train_tokenizer.vocab_size"
        )
    if not settings.cluster.container:
        check_boards(model.log, name)
    start = model.finetune
    if start and not start.is_relative_to(settings.run) and not newest_iteration(settings.model_folder(name)):
        check_finetune(model.model, name, start, tokenizer)
    with suppress(InputError):  # the run makes it yet, or the training says what is wrong with it
        if repeats := epochs.of_datasets(settings.models[name], name, settings.datasets(name)):
            note_once(f"models.{name}: {repeats}")


def check_contact(settings: Settings) -> None:
    """Raise ConfigError if the web would be scraped without scrape.contact."""
    needless = settings.scrape.contact or settings.scrape.resolve or settings.site  # corpus.scrape checks each host
    pages = shard_paths(settings.run / steps.named("scrape").folder, settings.shards, ".jsonl.zst")
    if not needless and not all(map(Path.exists, pages)):
        raise ConfigError("scrape.contact is empty: set a mail address or page for site owners to scrape the web")
