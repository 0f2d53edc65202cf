"""Keep documents by the probability that a fastText model gives to a label: a model of quality, or of languages."""

from functools import cache
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.settings import FastTextModel
from corpus.text.verdicts import Change, Text, Verdict


@cache
def _load(path: Path) -> Any:
    try:
        import fasttext
    except ImportError:
        raise ConfigError("clean.fasttext needs fasttext-predict; pip install 'urls-to-gpt2[fasttext]'") from None
    try:
        return fasttext.load_model(str(path))
    except ValueError as error:
        raise ConfigError(f"clean.fasttext: {path}: {error}") from None


def judge(text: Text, model: FastTextModel) -> Verdict:
    """Drop a text whose probability of the label is too low; the others carry it in `meta`, under the model's name."""
    found = _load(model.path).predict(text.replace("\n", " "), k=-1, threshold=-1.0)  # all labels
    scores = {label.removeprefix("__label__"): score for label, score in zip(*found, strict=True)}
    if model.label not in scores:
        raise ConfigError(f"clean.fasttext: {model.path} has no label {model.label!r}, but {', '.join(sorted(scores))}")
    score = round(min(1.0, scores[model.label]), 4)
    if score < model.least:
        return f"{model.label} {score:g}"
    return Change(meta={model.name: score})
