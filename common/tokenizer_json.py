"""Reads and writes tokenizer.json, the single file of a Hugging Face tokenizer, for GPT-2's byte-level BPE.

It writes what `transformers` saves for a GPT2Tokenizer, and reads any file that encodes text as GPT-2 does. Tokens
added after <|endoftext|>, such as a padding token, are ignored: text is only ever text here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.files import read_json
from common.vocabulary import CHARACTERS, END_OF_TEXT, Vocabulary

_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PLAIN = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")


@dataclass(frozen=True)
class TokenizerJson:
    """The file that defines a vocabulary in a Hugging Face folder."""

    path: Path


def to_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer.json."""
    end = {"id": len(vocabulary.ids) - 1, "content": END_OF_TEXT, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": _LEVEL,
        "post_processor": {**_LEVEL, "trim_offsets": False},
        "decoder": _LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary.ids,
            "merges": [merge.split(" ") for merge in vocabulary.merges],
        },
    }


def read_tokenizer_json(path: Path) -> Vocabulary:
    """The vocabulary in a tokenizer.json. Raises InputError if it encodes text differently from GPT-2."""
    raw = read_json(path)
    try:
        problem, vocabulary = _parse(raw)
    except (AttributeError, KeyError, TypeError, ValueError):
        problem, vocabulary = "not the structure of a tokenizer", None
    if vocabulary is None:
        raise InputError(f"{path}: {problem}; only byte-level BPE like GPT-2's is read")
    return vocabulary


def _parse(raw: Any) -> tuple[str, Vocabulary | None]:
    """(problem, None) or ("", vocabulary)."""
    model, level = raw["model"], raw["pre_tokenizer"]
    if model.get("type", "BPE") != "BPE":
        return f"its model is {model['type']}", None
    if changed := [key for key in _PLAIN if model.get(key)]:
        return f"its model has {changed[0]} {model[changed[0]]!r}", None
    if raw.get("normalizer"):
        return f"it has a normalizer, {raw['normalizer'].get('type')}", None
    if level is None or level["type"] != "ByteLevel" or not level.get("use_regex", True):
        return "its pre_tokenizer is not ByteLevel with GPT-2's pattern", None
    if level["add_prefix_space"]:
        return "it has add_prefix_space, which puts a space before each text", None
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokens = [*CHARACTERS, *(merge.replace(" ", "") for merge in merges), END_OF_TEXT]
    expected = {token: number for number, token in enumerate(tokens)}
    found = model["vocab"] | {token["content"]: token["id"] for token in raw.get("added_tokens", [])}
    for token, number in found.items():
        if expected.get(token, number) != number or (token not in expected and number < len(tokens)):
            return f"token {token!r} has id {number}, which differs from GPT-2's order", None
    if missing := [token for token in tokens if token not in found]:
        return f"it has no token {missing[0]!r}", None
    return "", Vocabulary(expected, merges)
