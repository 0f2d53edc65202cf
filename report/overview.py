"""The first screen: what the run is, what went in, what came out."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.page import duration, number
from common.settings import Settings
from report.funnel import Step
from report.models import Model
from report.timing import Clock, Work

_SAMPLE = re.compile(r"^--- (sample \d+, seed \d+)\n", re.MULTILINE)


def facts(steps: Sequence[Step], models: Sequence[Model], works: Sequence[Work]) -> list[tuple[str, str]]:
    """(name, value) of what a person wants to know first."""
    found: list[tuple[str, str]] = []
    if works:
        ended = max(work.ended for work in works)
        found.append(("finished (UTC)", f"{datetime.fromtimestamp(ended, UTC):%Y-%m-%d %H:%M}"))
        found.append(("time at work", duration(Clock(works).at(ended))))
    if steps:
        first, last = steps[0], steps[-1]
        found.append((f"{first.unit} in", number(first.documents_in)))
        found.append(("documents kept", number(last.documents_out)))
        if last.tokens is not None:
            found.append(("tokens in the dataset", number(last.tokens)))
    for model in models:
        head = f"{model.name}: " if len(models) > 1 else ""
        if model.parameters:
            found.append((f"{head}parameters", number(model.parameters)))
        if model.tokens:
            found.append((f"{head}tokens seen", number(model.tokens)))
        if model.epochs:
            found.append((f"{head}epochs", f"{model.epochs:.2f}"))
        if model.valid_loss is not None:
            found.append((f"{head}validation loss", f"{model.valid_loss:.4f}"))
        if per_byte := (model.evaluation or {}).get("bits_per_byte"):
            found.append((f"{head}bits per byte", f"{per_byte:.4f}"))
    return found


def split_samples(text: str, settings: Settings | None) -> list[tuple[str, str, str]]:
    """(heading, prompt, continuation) of each sample in a file of `training.generate`.

    The prompt is empty if a sample does not begin with the configured one; the heading, if it is the only sample.
    """
    prompt = settings.generate.prompt if settings else ""
    parts = _SAMPLE.split(text)
    texts = list(zip(parts[1::2], parts[2::2], strict=True)) if len(parts) > 1 else [("", text)]
    begins = [prompt if prompt and sample.startswith(prompt) else "" for _, sample in texts]
    found = zip(texts, begins, strict=True)
    return [(heading, begin, sample[len(begin) :].rstrip()) for (heading, sample), begin in found]


def versions(run_card: Mapping[str, Any] | None, steps: Sequence[Step], models: Sequence[Model]) -> dict[str, str]:
    """What the run's files say about the software."""
    found: dict[str, str] = {}
    for step in steps:
        found.update(step.libraries)
    for model in models:
        found.update((model.merged or {}).get("versions", {}))
    found.update((run_card or {}).get("versions", {}))
    return {name: str(version) for name, version in sorted(found.items())}


def in_short(run: Path, models: Sequence[Model]) -> str:
    """One sentence that says what the page is about."""
    names = ", ".join(model.name for model in models)
    return f"{run}: the corpus, step by step{f', and the training of {names}' if names else ''}."
