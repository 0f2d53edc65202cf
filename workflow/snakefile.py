"""What the Snakefile calls: read the settings when it is parsed, write them when a run starts.

Parsing writes nothing into a run, so `snakemake -n`, a second Snakemake that finds the run locked,
and another configuration with the same `run` change no file. When a run starts (`onstart`: after
the lock, never with -n), the resolved settings are written to RUN/settings/DIGEST.yaml, which never
changes again. Every job reads that file, also on other nodes and after the configuration was
edited; its path is in the environment variable URLS_TO_GPT2_SETTINGS. RUN/config.yaml is a copy for
people; RUN/run.json is the run's card.
"""

import gc
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import reduce, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from cluster.corpus_jobs import dag_jobs
from common import run_card
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
from common.files import find_inputs, write_json
from common.settings import Settings
from workflow import patches
from workflow.checks import check_crawl, check_parsed, crawl_layout
from workflow.runs import place

_COLLECT = 200_000  # new objects between two searches for cycles: a DAG has millions, and few of them are garbage

Given = ParamSpec("Given")
Result = TypeVar("Result")


def or_exit(action: Callable[Given, Result]) -> Callable[Given, Result]:
    """Wraps `action`: user errors become one line and exit code 2."""

    @wraps(action)
    def run(*arguments: Given.args, **named: Given.kwargs) -> Result:
        try:
            return action(*arguments, **named)
        except (ToolkitError, OSError) as error:
            sys.exit(fail(error))

    return run


def settings_for_workflow(files: Iterable[Path], overrides: Iterable[str]) -> Settings:
    """The settings of configuration files, where later ones win, and of `key=value` overrides.

    Raises ConfigError, also for an input that does not exist.
    """
    paths = list(files)
    raw: dict[str, Any] = reduce(merged, map(read_yaml, paths), {})
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
    """The settings of the Snakemake that submitted this job. Raises ConfigError without them."""
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
    check_parsed(settings)
    patches.install(workflow, settings)
    dag_jobs.parsed = (workflow, settings)
    os.environ[JOB_SETTINGS] = str(settings_path(settings))
    return settings


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
    now = place(settings.run)
    run_card.write_card(settings.run / run_card.NAME, settings=path, inputs=_inputs(settings), **now)
    if settings.urls:
        write_json(crawl_layout(settings), {"shards": settings.shards})
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
        if source.is_remote:  # the listing of the run names its files
            continue
        yield from source.files or [Path(source.path)]
    yield from map(Path, settings.blacklist.domain_lists)
    for name, model in settings.models.items():
        if model.finetune is not None:
            yield model.finetune
        others = [data.prefix for data in settings.datasets(name) if data.prefix != settings.dataset_prefix]
        yield from (Path(f"{prefix}.{suffix}") for prefix in others for suffix in ("bin", "idx"))
