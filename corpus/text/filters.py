"""Filters that drop or change documents: functions of the repaired text that say what is wrong.

    text = Text(repair(document["text"]))
    [rule.judge(text) for rule in filters(settings)]

OpenWebText's rules always, others by their name in `clean.filters`. To add one, write its function
and add it to NAMED.
"""

from collections.abc import Collection
from difflib import get_close_matches
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.settings import CleanSettings, FastTextModel
from corpus.text import quality
from corpus.text.pii import pii
from corpus.text.verdicts import Change, Filter, Text, Verdict

NAMED = {
    "gopher": (
        *(quality.gopher_words, quality.gopher_word_length, quality.gopher_symbols, quality.gopher_bullets),
        *(quality.gopher_ellipsis, quality.gopher_alphabetic, quality.gopher_stop_words),
    ),
    "gopher_repetition": (quality.gopher_repetition,),
    "c4": (quality.c4,),
    "fineweb": (quality.fineweb,),
    "pii": (pii,),
    "digits": (quality.digits,),
}
"""What `clean.filters` may name."""
_FASTTEXT = (793_712_314).to_bytes(4, "little")  # a model of fastText begins with it
_SPACY = ("gopher_repetition", "c4", "fineweb")  # these split words or sentences as spaCy does


def filters(settings: CleanSettings) -> tuple[Filter, ...]:
    """The filters of a configuration in order; the slowest are last.

    Raises ConfigError for a name that does not exist, and for a package or model that is missing.
    """
    for name in settings.filters:
        if name not in NAMED:
            close = get_close_matches(name, NAMED, n=1)
            raise ConfigError(
                f"clean.filters: {name!r} is not one of {', '.join(NAMED)}" + (f"; {close[0]}?" if close else "")
            )
        if name in _SPACY and find_spec("spacy") is None:
            raise ConfigError(f"clean.filters: {name} needs spaCy; pip install 'urls-to-gpt2[filters]'")
    for model in settings.fasttext:
        _check_model(model.path)
    return (
        Filter("empty", empty),
        Filter("javascript", partial(javascript, most=settings.javascript_characters)),
        Filter("short", partial(short, least=settings.min_characters)),
        *(Filter(rule.__name__, rule) for name in settings.filters for rule in NAMED[name]),
        *([Filter("language", partial(language, expected=settings.languages))] if settings.languages else ()),
        *(Filter(model.name, partial(fasttext, model=model)) for model in settings.fasttext),
    )


def empty(text: Text) -> Verdict:
    """No text at all, or white space alone."""
    return None if text.strip() else "no text"


def javascript(text: Text, most: int) -> Verdict:
    """A short notice that the browser lacks JavaScript, in place of the page."""
    notice = len(text) < most and "javascript" in text.lower()
    return f"{len(text)} characters with 'javascript'" if notice else None


def short(text: Text, least: int) -> Verdict:
    """Too few characters."""
    return f"{len(text)} characters" if len(text) < least else None


def language(text: Text, expected: Collection[str]) -> Verdict:
    """Another language than the expected ones."""
    code, score = text.language
    if code not in expected:
        return code or "no letters"
    return Change(meta={"detected_language": code, "detected_score": score})  # `language` may be the source's


def _check_model(path: Path) -> None:
    """Raise ConfigError if fastText is not installed, or the file is not a model."""
    if find_spec("fasttext") is None:
        raise ConfigError("clean.fasttext needs fasttext-predict; pip install 'urls-to-gpt2[fasttext]'")
    if not path.is_file():
        raise ConfigError(f"clean.fasttext: {path}: no such file")
    with path.open("rb") as file:
        if file.read(len(_FASTTEXT)) != _FASTTEXT:
            raise ConfigError(f"clean.fasttext: {path}: no fastText model; give a .bin or .ftz file")


@cache
def _model(path: Path) -> Any:
    import fasttext

    try:
        return fasttext.load_model(str(path))
    except ValueError as error:
        raise ConfigError(f"clean.fasttext: {path}: {error}") from None


def fasttext(text: Text, model: FastTextModel) -> Verdict:
    """A label whose probability is too low; kept documents have it in `meta`."""
    labels, probabilities = _model(model.path).predict(text.replace("\n", " "), k=-1, threshold=-1.0)  # of all labels
    scores = {label.removeprefix("__label__"): score for label, score in zip(labels, probabilities, strict=True)}
    if model.label not in scores:
        raise ConfigError(f"clean.fasttext: {model.path} has no label {model.label!r}, but {', '.join(sorted(scores))}")
    score = round(min(1.0, scores[model.label]), 4)
    if score < model.least:
        return f"{model.label} {score:g}"
    return Change(meta={model.name: score})
