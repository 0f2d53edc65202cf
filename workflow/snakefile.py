"""What the Snakefile calls: read the settings when it is parsed, and write them when a run starts.

Parsing writes nothing into a run, so `snakemake -n`, a second Snakemake that finds the run locked, and another
configuration with the same `run` change no file. When a run starts (`onstart`: after the lock, never with -n), the
resolved settings are written to RUN/settings/DIGEST.yaml, which never changes again. Every job of the run reads that
file; its path is in the environment variable URLS_TO_GPT2_SETTINGS. A job on another node parses the Snakefile again
and reads the same file, because the configuration may have been edited since. RUN/config.yaml is a copy for people;
RUN/run.json is the run's card.
"""

import gc
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from cluster.corpus_jobs import dag_jobs
from common import run_card, steps
from common.cli import refuse_other_copy
from common.config import (
    JOB_SETTINGS,
    load_settings,
    merged,
    read_yaml,
    settings_text,
    validate,
    with_overrides,
    write_settings,
)
from common.console import fail, say, warn
from common.errors import ConfigError, ToolkitError
from common.files import REMOVED_IDS, find_inputs, read_json, shard_paths, write_json
from common.settings import Settings, closest
from common.tokenizer import Tokenizer, vocabulary_files
from training.huggingface.config import check_finetune
from training.metrics.boards import check_boards
from training.model_folder import is_finished, newest_iteration
from training.planning.fit import prepare
from training.planning.machines import machine
from workflow import growing, patches

_COLLECT = 200_000  # new objects between two searches for cycles: a DAG has millions, and few of them are garbage

Given = ParamSpec("Given")
Result = TypeVar("Result")


def or_exit(action: Callable[Given, Result]) -> Callable[Given, Result]:
    """`action`, of which an error that the user can cure becomes one line and exit code 2, as in every step."""

    @wraps(action)
    def run(*arguments: Given.args, **named: Given.kwargs) -> Result:
        try:
            return action(*arguments, **named)
        except (ToolkitError, OSError) as error:
            sys.exit(fail(error))

    return run


def settings_for_workflow(files: Iterable[Path], overrides: Iterable[str]) -> Settings:
    """The settings of several configuration files, of which later ones win, and of `key=value` overrides.

    Raises ConfigError, also for an input that does not exist.
    """
    paths, raw = list(files), dict[str, Any]()
    for path in paths:
        raw = merged(raw, read_yaml(path))
    source = ", ".join(map(str, paths))
    settings = validate(with_overrides(raw, overrides), source)
    try:
        settings.check_inputs()
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    return settings


def settings_path(settings: Settings) -> Path:
    """Where the resolved settings of a run are written; the file name is a hash of the content."""
    digest = hashlib.sha256(settings_text(settings).encode()).hexdigest()
    return settings.run / "settings" / f"{digest[:16]}.yaml"


def settings_of_job(environment: Mapping[str, str]) -> Settings:
    """The settings of the Snakemake that submitted this job. Raises ConfigError if the job did not get them."""
    name = environment.get(JOB_SETTINGS)
    if not name:
        raise ConfigError(
            f"{JOB_SETTINGS} is not set: the job did not get the environment of the Snakemake that submitted it; "
            "submit with --export=ALL"
        )
    return load_settings(Path(name))


@or_exit
def read_settings(workflow: Any) -> Settings:
    """The settings of the workflow that is being parsed. Exits with one line if they are wrong."""
    for folder in (Path.cwd(), Path(workflow.main_snakefile).resolve().parent):
        refuse_other_copy(folder)
    gc.set_threshold(_COLLECT)  # a tenth of the time of planning
    # Steps run with the Python that runs Snakemake, whether its environment is activated or not.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if not workflow.is_main_process:
        return settings_of_job(os.environ)
    # --configfile FILE replaces config.yaml: merging the two would mix two experiments.
    files = workflow.overwrite_configfiles or [Path("config.yaml")]
    settings = settings_for_workflow(files, workflow.config_settings.config_args or [])
    check_crawl(settings)
    check_takedown(settings)
    growing.check(settings)
    check_names(settings)
    check_files(settings)
    patches.install(workflow, settings)
    dag_jobs.parsed = (workflow, settings)
    os.environ[JOB_SETTINGS] = str(settings_path(settings))
    return settings


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
    """Open the files of the corpus that the configuration names, and look for the packages that it needs.

    Files that the run makes itself may not exist yet. Raises ToolkitError.
    """
    if settings.blacklist.domain_lists:
        from corpus.urls.domain_lists import DomainBlocklist  # takes a third of a second

        DomainBlocklist(settings.blacklist)
    tables = [path for source in settings.sources for path in source.files if path.suffix in (".parquet", ".arrow")]
    if tables and find_spec("pyarrow") is None:
        raise ConfigError(f"sources: {tables[0]} needs pyarrow; pip install 'urls-to-gpt2[parquet]'")
    own_tokenizer(settings)


def check_evaluation(settings: Settings) -> None:
    """Raise ConfigError if lm_eval is missing, or the folder of its tasks holds none."""
    folder = settings.evaluate.task_dir
    if folder and not any(folder.rglob("*.yaml")):
        raise ConfigError(f"evaluate.task_dir: {folder}: holds no YAML file; name the folder with the tasks' files")
    if settings.evaluate.tasks and find_spec("lm_eval") is None:
        raise ConfigError("evaluate.tasks needs lm_eval; pip install 'urls-to-gpt2[eval]'")


def own_tokenizer(settings: Settings) -> Tokenizer | None:
    """The tokenizer that the run is given; None if it trains one. Raises InputError for files that are damaged."""
    if settings.train_tokenizer.vocab_size:
        return None
    tokenizer = Tokenizer(vocabulary_files(settings.tokenize.encoder_json, settings.tokenize.vocab_bpe))
    if settings.tokenize.encoder_json:
        _ = tokenizer.vocabulary  # reads the files
    return tokenizer


def check_model(settings: Settings, name: str) -> None:
    """Check what the training of a model needs besides data: memory, vocabulary, initial weights, Weights & Biases.

    Raises ToolkitError, also if the model is finished with other settings.
    """
    if is_finished(settings, name):
        return
    model, tokenizer = settings.models[name], own_tokenizer(settings)
    prepare(settings, name)
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


def check_contact(settings: Settings) -> None:
    """Raise ConfigError if the web would be scraped without scrape.contact; corpus.scrape checks every host."""
    needless = settings.scrape.contact or settings.scrape.resolve or settings.site
    pages = shard_paths(settings.run / steps.named("scrape").folder, settings.shards, ".jsonl.zst")
    if not needless and not all(map(Path.exists, pages)):
        raise ConfigError("scrape.contact is empty: set a mail address or page for site owners to scrape the web")


@or_exit
def prepare_run(settings: Settings) -> None:
    """Write the settings of a run that starts."""
    check_crawl(settings)
    path = settings_path(settings)
    write_settings(settings, path)
    if path.stat().st_mode & 0o222:  # only its owner may: another member of the group continues the run
        path.chmod(0o444)
    write_settings(settings, settings.run / "config.yaml")
    patches.restore_times(settings.run)
    place = patches.place(settings.run)
    run_card.write_card(settings.run / run_card.NAME, settings=path, inputs=_inputs(settings), **place)
    if settings.urls:
        write_json(_crawl_layout(settings), {"shards": settings.shards})
    if warning := settings.dedup.low_recall():
        warn(warning)


def print_results(workflow: Any) -> None:
    """Print where a run that ended well has its report and its models."""
    for job in workflow.dag.jobs:
        if job.rule.name == "report":
            say(f"report: {job.output.page}")
        elif job.rule.name == "merge":
            say(f"model:  {Path(job.output.config).parent}")


def _inputs(settings: Settings) -> Iterable[Path]:
    """Every file that the configuration names and the run does not make itself."""
    for pattern in (*settings.urls, *settings.decontaminate.files):
        yield from find_inputs(pattern, "lists")[0] or [Path(pattern)]
    for source in settings.sources:
        yield from source.files or [Path(source.path)]
    yield from map(Path, settings.blacklist.domain_lists)
    for name, model in settings.models.items():
        if model.finetune is not None:
            yield model.finetune
        others = [data.prefix for data in settings.datasets(name) if data.prefix != settings.dataset_prefix]
        yield from (Path(f"{prefix}.{suffix}") for prefix in others for suffix in ("bin", "idx"))


def check_takedown(settings: Settings) -> None:
    """Raise ConfigError if documents have left only a part of the run."""
    for record in sorted((settings.run / REMOVED_IDS.parent).glob("*.json")):
        if read_json(record)["state"] != "done":
            raise ConfigError(
                f"{record}: not finished; python -m workflow.provenance.remove --run {settings.run} --yes finishes it"
            )


def _crawl_layout(settings: Settings) -> Path:
    """A file beside the pages, so that it moves with them, with their number of shards."""
    return settings.run / steps.named("scrape").folder / "layout.json"


def check_crawl(settings: Settings) -> None:
    """Raise ConfigError if the run has pages that were crawled with another number of shards.

    All URLs of a host go to one shard, so that with another number every page would be fetched again.
    """
    layout = _crawl_layout(settings)
    if settings.urls and layout.is_file() and any(path != layout for path in layout.parent.iterdir()):
        shards = read_json(layout)["shards"]
        if shards != settings.shards:
            raise ConfigError(
                f"{layout.parent} holds a crawl in {shards} shards, and with `shards: {settings.shards}` every URL of "
                f"it would be fetched again; set `shards: {shards}`, or move {layout.parent} away to crawl again"
            )
