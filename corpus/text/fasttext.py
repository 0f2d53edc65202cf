"""Keep documents by the probability that a fastText model gives to a label: a model of quality, or of languages."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.settings import FastTextModel
from corpus.text.verdicts import Change, Text, Verdict

_MAGIC = (793_712_314).to_bytes(4, "little")


def check(path: Path) -> None:
    """Raise ConfigError if fastText is not installed, or the file does not begin as a model does."""
    if find_spec("fasttext") is None:
        raise ConfigError("clean.fasttext needs fasttext-predict; pip install 'urls-to-gpt2[fasttext]'")
    if not path.is_file():
        raise ConfigError(f"clean.fasttext: {path}: no such file")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"clean.fasttext: {path}: no fastText model; give a .bin or .ftz file")


@cache
def _load(path: Path) -> Any:
    import fasttext

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
