"""tokenizer.json, the one file of a Hugging Face tokenizer: GPT-2's byte-level BPE written, and read where it is that.

Written: what `transformers` saves for a GPT2Tokenizer. Read: files whose encoding is GPT-2's. Tokens that were added
behind <|endoftext|> (a padding token, say) are left out: text is only ever text here.
"""

from pathlib import Path
from typing import Any

from common.errors import InputError
from common.files import read_json
from common.tokenizer import CHARACTERS, END_OF_TEXT, Vocabulary

_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PLAIN = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")


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
    """The vocabulary in a tokenizer.json. Raises InputError where it would encode text in another way than GPT-2's."""
    raw = read_json(path)
    try:
        problem, vocabulary = _parse(raw)
    except (AttributeError, KeyError, TypeError, ValueError):
        problem, vocabulary = "its parts are not those of a tokenizer", None
    if vocabulary is None:
        raise InputError(f"{path}: {problem}; only byte-level BPE like GPT-2's is read")
    return vocabulary


def _parse(raw: Any) -> tuple[str, Vocabulary | None]:
    """What is wrong, or the vocabulary."""
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
            return f"token {token!r} has id {number}, another one than it has in GPT-2's order", None
    if missing := [token for token in tokens if token not in found]:
        return f"it has no token {missing[0]!r}", None
    return "", Vocabulary(expected, merges)
