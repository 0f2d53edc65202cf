"""GPT-2's byte-level BPE, offline: gigatoken, or tiktoken where gigatoken has no wheel; both give the same ids.

Text is only ever text: `<|endoftext|>` written inside a web page becomes ordinary tokens, never id 50256.
`common.vocabulary` reads the files.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import orjson

from common.errors import InputError
from common.vocabulary import (
    END_OF_TEXT,
    TokenizerJson,
    Vocabulary,
    VocabularyFiles,
    read_tokenizer_json,
    read_vocabulary_files,
    vocabulary_files,
)

__all__ = [
    "END_OF_TEXT",
    "Ids",
    "Lengths",
    "Tokenizer",
    "TokenizerJson",
    "Vocabulary",
    "VocabularyFiles",
    "vocabulary_files",
]

Ids = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]

# gigatoken caches every word, in up to ten times its size: after this many bytes of text, start a new one.
_CACHED_BYTES = 128 << 20


class _Gigatoken:
    """The fast encoder. Raises ImportError if it is not installed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import awkward
        import gigatoken

        self._flatten, self._count = awkward.flatten, awkward.num  # for the ragged arrays that it returns
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
        model = {"type": "BPE", "vocab": vocabulary.ids, "merges": vocabulary.merges}
        self._json = orjson.dumps({"model": model, "pre_tokenizer": level})
        self._load = gigatoken.Tokenizer.from_json
        self._start()

    def _start(self) -> None:
        self._tokenizer = self._load(self._json)
        self._cached = 0

    def __call__(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        data = [text.encode() for text in texts]
        if self._cached > _CACHED_BYTES:
            self._start()
        self._cached += sum(map(len, data))
        ids = self._tokenizer.encode_batch(data, parallel=False)  # the caller has its own threads
        return self._flatten(ids).to_numpy(), self._count(ids).to_numpy()


class _Tiktoken:
    """The encoder for every other platform, ten times slower."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        ranks = {token: number for number, token in enumerate(vocabulary.tokens)}
        special = {
            END_OF_TEXT: ranks.pop(END_OF_TEXT.encode())
        }  # never encoded, but without any it takes twice the time
        encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
        self._encode = partial(encoding.encode_to_numpy, disallowed_special=())

    def __call__(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        ids = [np.empty(0, np.uint32), *map(self._encode, texts)]
        return np.concatenate(ids), np.array([len(one) for one in ids[1:]], np.int64)


class Tokenizer:
    """Encodes and decodes with one vocabulary, which is loaded on first use. Picklable and thread-safe."""

    def __init__(self, files: VocabularyFiles | TokenizerJson | None = None) -> None:
        self.files = files or vocabulary_files()

    def __getstate__(self) -> dict[str, VocabularyFiles | TokenizerJson]:
        return {"files": self.files}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """All entries and merges. Raises InputError for files that are damaged or not GPT-2's kind."""
        if isinstance(self.files, TokenizerJson):
            return read_tokenizer_json(self.files.path)
        return read_vocabulary_files(self.files)

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
