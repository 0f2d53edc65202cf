"""What a run takes from the finished runs that it extends (`base`), and what must be equal in all of them.

Nothing here writes: the earlier runs keep every byte.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import steps
from common.config import load_settings
from common.errors import ConfigError
from common.files import sha256
from common.settings import Settings


def known(step: str, settings: Settings) -> list[Path]:
    """What earlier runs have read: their URLs for `blacklist`, for `ingest` the statistics that name its inputs."""
    results = [steps.result(step, run) for run in settings.base]
    return [path.parent if step == "blacklist" else path for path in results if path.is_file()]


def check(settings: Settings) -> None:
    """Raise ConfigError if the run cannot extend its base: one is missing or unfinished, or has another vocabulary."""
    for run in settings.base:
        if run == settings.run:
            raise ConfigError(f"base: {run} is this run itself; choose another folder for `run`")
        if not (run / "config.yaml").is_file():
            raise ConfigError(f"base: {run}: no run there; name the folder of a finished run")
        then = load_settings(run / "config.yaml").model_copy(update={"run": run})
        for step in steps.configured(then):
            if step.name in ("blacklist", "ingest", "merge_index") and not steps.result(step.name, run).is_file():
                raise ConfigError(f"base: {run}: {step.pattern} is missing; finish that run first: snakemake dataset")
        if missing := [str(path) for path in then.base if path not in settings.base]:
            raise ConfigError(f"base: {run} extends {', '.join(missing)}; name that run, too, before {run}")
        for (key, old, content), (_, new, now) in zip(_shared(then), _shared(settings), strict=True):
            if content != now:
                raise ConfigError(f"{key} is {new}, but {run}, which this run extends, has {old}; make them equal")


def _shared(settings: Settings) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, content) of what all parts of a corpus have in common: comparable signatures, one vocabulary."""
    for key, value in steps.keys("dedup_signatures", settings).items():
        yield f"dedup.{key}", value, value
    yield "tokenize.append_eod", settings.tokenize.append_eod, settings.tokenize.append_eod
    for key in ("encoder_json", "vocab_bpe"):
        path = getattr(settings.tokenize, key)
        yield f"tokenize.{key}", path or "GPT-2's", sha256(path) if path and path.is_file() else path
