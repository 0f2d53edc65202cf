"""A model that has been trained keeps its corpus, and what it could not go on with is refused.

    error: results/x: clean.min_characters 512 -> 600 would make another corpus than the one that
    tiny was trained on, …

Called when the DAG is complete and no job has started, with -n, too. A job that runs again with the
settings and inputs of its record writes the same bytes, so that deleted results, `-R STEP` and
`--forceall` are no change.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

from common import steps
from common.errors import ConfigError, InputError
from common.files import read_json
from common.settings import Settings, changes
from corpus.index import content_of, suffixed
from corpus.index.documents import DocumentTable
from training.dataset.blend import open_training_part
from training.model_folder import as_in, checkpoint_folders, last_settings

# Keys that no step names, because Snakemake compares them as params or inputs of rules
_COMPARED = ("base", "shards", "site", "tokenize.encoder_json", "tokenize.vocab_bpe")
_LONGEST = 100  # characters of a changed key


def check_dag(settings: Settings, dag: Any) -> None:
    """`check_trained` for the jobs of a DAG."""
    if not any((settings.run / steps.named("train").folder).glob("*/iter_*")):
        return  # a search for changes reads the record of every job
    corpus = {step.name for step in steps.CORPUS}
    jobs = [(steps.of_rule(job.rule.name), job) for job in dag.needrun_jobs()]
    remade = [(step, job) for step, job in jobs if step in corpus]
    changed = {step: None for step, job in remade if dag.workflow.persistence.made_otherwise(job)}
    training = {job.wildcards.model for step, job in jobs if step == "train"}
    check_trained(settings, training, {step for step, _ in remade}, list(changed))


def check_trained(settings: Settings, training: Iterable[str], remade: set[str], changed: Iterable[str]) -> None:
    """Raise ToolkitError if a model would lose its corpus, or its training refuse to continue.

    training: models of which a `train` job runs
    remade: corpus steps that run
    changed: those of them whose input or settings have changed, by Snakemake's records
    """
    why = [f"other input of {step}" for step in changed]
    if "tokenize" in remade and has_tombstones(settings.dataset_prefix):
        why.append("tokenize, which leaves no tombstones of the documents that were removed,")
    refused, lines = list[Path](), dict[str, None]()
    for folder in sorted((settings.run / steps.named("train").folder).glob("*")) if remade else ():
        if not checkpoint_folders(folder):
            continue
        # Another corpus than the model's may be replaced, even by that of the model's own settings.
        holds = was_trained_on(folder, settings.dataset_prefix)
        needs = holds or (folder.name in training and reads_corpus(settings, folder.name))
        found = changed_keys(last_settings(settings, folder.name), settings) if needs else []
        if found := found or why * holds:
            refused.append(folder)
            lines |= dict.fromkeys(found)
    if refused:
        raise ConfigError(
            f"{settings.run}: {', '.join(lines)} would make another corpus than the one that "
            f"{' and '.join(folder.name for folder in refused)} was trained on, and training never goes on with other "
            f"data. Set it back; or choose another `run`: with `base: [{settings.run}]` it adds new documents to this "
            f"corpus, without it everything is made again; or move {' and '.join(map(str, refused))} away: then the "
            "corpus is replaced, and training starts from scratch"
        )
    for name in sorted(training):
        if checkpoint_folders(settings.model_folder(name)):
            check_resume(settings, name, remade=bool(remade) and reads_corpus(settings, name))


def check_resume(settings: Settings, name: str, *, remade: bool) -> None:
    """Raise CheckpointError if the training of a model would refuse to continue.

    `remade`: its data are made again, so that only the settings can be compared.
    """
    from training.checkpoint import check_fits, newest  # imports torch, for models that go on alone

    model, data = settings.models[name], None
    with suppress(InputError):  # the training says what is wrong with it
        data = None if remade else open_training_part(settings.datasets(name), model.train, model.model.seq_len)
    if (last := newest(settings.model_folder(name), content=False)) is not None:
        check_fits(last, name=name, experiment=model, data=data)


def changed_keys(then: Settings, now: Settings) -> list[str]:
    """The keys of corpus steps that differ: `clean.min_characters 512 -> 600`."""
    before, after = then.model_dump(mode="json"), as_in(then.run, now.model_dump(mode="json"), now.run)
    configured = {step.name: step for settings in (then, now) for step in steps.configured(settings)}
    keys = {*_COMPARED, *(key for step in configured.values() for key in (*step.keys, step.needs) if key)}
    fetching = steps.named("ingest").omitted  # how sources are fetched
    return [
        shorten(line, _LONGEST, placeholder=" …")
        for line in changes(before, after)
        if any(line.startswith((f"{key} ", f"{key}.")) for key in keys)
        and re.sub(r"\.\d+\.", ".", line.partition(" ")[0]) not in fetching
    ]


def reads_corpus(settings: Settings, name: str) -> bool:
    """Whether a model is trained on the corpus of the run."""
    return any(source.prefix == settings.dataset_prefix for source in settings.datasets(name))


def was_trained_on(folder: Path, prefix: Path) -> bool:
    """Whether the newest checkpoint of a model folder was trained on what a dataset holds now."""
    with suppress(InputError, OSError):
        return content_of(prefix) in read_json(checkpoint_folders(folder)[0] / "manifest.json")["content"]
    return False


def has_tombstones(prefix: Path) -> bool:
    """Whether documents were removed from a dataset since it was made."""
    with suppress(InputError):
        return suffixed(prefix, ".bin").is_file() and bool((DocumentTable(prefix).ids == 0).any())
    return False
