"""The settings keys that each rule's output depends on; Snakemake compares them to decide which jobs to run again.

Changing a key that is not here (a time-out, a delay, memory, workers, jobs, logging, the parallel layout) never repeats
finished work. Input files are not listed either: their changes propagate through the DAG
(files from outside of the run: common/run_records.py).
"""

from typing import Any

from common.settings import Section, Settings

Keys = dict[str, Any]

# Only the blacklist step reads Pushshift dumps; the other URL rules apply to redirects, too.
_DUMPS = {"min_score", "over_18", "self_posts"}
_PAGE = {"extractors", "max_bytes", "max_redirects", "obey_robots"}
_SIGNATURES = {"shingle_characters", "shingle_words", "bands", "rows", "seed"}
# How training runs, is watched and is saved; the batch of a step is global_batch_size.
_RUNNING = {"parallel", "watch", "log", "slurm", "time_limit_minutes"}
TRAIN_RUNNING = {
    *("micro_batch_size", "accumulation", "recompute", "compile", "readers", "log_interval", "eval_interval"),
    *("attention", "loss", "kernels", "deterministic"),
    *("eval_batches", "save_interval", "async_save", "keep_last", "keep_every", "allow_slow", "allow_tight"),
}


def _keys(section: Section, include: set[str] | None = None, exclude: set[str] | None = None) -> Keys:
    return section.model_dump(mode="json", include=include, exclude=exclude)


def blacklist(settings: Settings) -> Keys:
    """Every URL rule."""
    return _keys(settings.blacklist)


def scrape(settings: Settings) -> Keys:
    """What changes the text of a page: not how politely or patiently it is fetched."""
    return {**_keys(settings.scrape, include=_PAGE), "redirects": _keys(settings.blacklist, exclude=_DUMPS)}


def ingest(settings: Settings) -> Keys:
    """The sources and how to read them."""
    return {"sources": [_keys(source) for source in settings.sources]}


def clean(settings: Settings) -> Keys:
    """Repair and filters."""
    return _keys(settings.clean)


def dedup_signatures(settings: Settings) -> Keys:
    """Shingles and permutations."""
    return _keys(settings.dedup, include=_SIGNATURES)


def dedup_verify(settings: Settings) -> Keys:
    """The threshold."""
    return _keys(settings.dedup, include={"threshold"})


def decontaminate_count(settings: Settings) -> Keys:
    """Which n-grams are counted; the evaluation sets are input files."""
    return _keys(settings.decontaminate, include={"min_words", "max_words"})


def decontaminate(settings: Settings) -> Keys:
    """Which n-grams are cut, and how; the evaluation sets are input files."""
    return _keys(settings.decontaminate, exclude={"files"})


def train_tokenizer(settings: Settings) -> Keys:
    """The size of the vocabulary and the share of the documents."""
    return _keys(settings.train_tokenizer)


def tokenize(settings: Settings) -> Keys:
    """Which documents are encoded and how; vocabulary files are input files."""
    return _keys(settings.tokenize, include={"min_tokens", "append_eod"})


def train(settings: Settings, model: str) -> Keys:
    """Architecture, data and recipe; not the parallel layout, which may change when training resumes."""
    experiment = settings.models[model]
    return {**_keys(experiment, exclude=_RUNNING), "train": _keys(experiment.train, exclude=TRAIN_RUNNING)}


def evaluate(settings: Settings, model: str) -> Keys:
    """The split and the number of tokens, which decide what is scored."""
    return {**_keys(settings.models[model].train, include={"split"}), **_keys(settings.evaluate)}


def generate(settings: Settings) -> Keys:
    """Prompt, sampling and number of texts."""
    return _keys(settings.generate)


def changed(then: Keys, now: Keys, section: str) -> list[str]:
    """The keys below `section` that differ, each with both values: `models.tiny.train.lr (0.001, now 0.01)`."""
    found = []
    for key in {**then, **now}:
        old, new, name = then.get(key), now.get(key), f"{section}.{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            found += changed(old, new, name)
        elif old != new:
            found.append(f"{name} ({old}, now {new})")
    return found
