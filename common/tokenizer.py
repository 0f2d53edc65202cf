"""Byte-level BPE like GPT-2's, offline, by gigatoken, or tiktoken where gigatoken has no wheel.

`<|endoftext|>` in a text becomes ordinary tokens, never its id. Tokens that a Hugging Face folder
adds to GPT-2's, such as a chat model's, are found in texts as `transformers` finds them.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from common.errors import InputError
from common.vocabulary import (
    END_OF_TEXT,
    LEVEL,
    Vocabulary,
    VocabularyFiles,
    entries,
    read_vocabulary,
    to_json,
    vocabulary_files,
)

Ids = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]
Encode = Callable[[Sequence[str]], tuple[Ids, Lengths]]

_CACHED_BYTES = 128 << 20  # of text, in up to ten times that memory; gigatoken caches every word


def _gigatoken(vocabulary: Vocabulary) -> Encode:
    """The fast encoder. Raises ImportError if it is not installed."""
    import awkward  # for the ragged arrays that it returns
    import gigatoken

    model = {"type": "BPE", "vocab": vocabulary.ids, "merges": vocabulary.merges}
    description = orjson.dumps({"model": model, "pre_tokenizer": {**LEVEL, "trim_offsets": False}})
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
    """The encoder for other platforms, ten times slower."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    known = [vocabulary.ids[entry] for entry in entries(vocabulary.merges)]
    ranks = {vocabulary.tokens[number]: rank for rank, number in enumerate(known)}
    special = {END_OF_TEXT: len(ranks)}  # never encoded; without a special token, it takes twice the time
    to_id = np.array(known, np.uint32)
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)

    def encode(texts: Sequence[str]) -> tuple[Ids, Lengths]:
        ids = [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
        return to_id[np.concatenate([np.empty(0, np.uint32), *ids])], np.array([*map(len, ids)], np.int64)

    return encode


def _with_added(vocabulary: Vocabulary, plain: Encode) -> Encode:
    """`plain` for texts without an added token; the library `tokenizers` for the others."""
    from tokenizers import Tokenizer as Library

    description = to_json(vocabulary)
    description["added_tokens"] = [token._asdict() for token in vocabulary.added]  # end-of-text stays text
    library = Library.from_str(orjson.dumps(description).decode())
    has_added = re.compile("|".join(re.escape(token.content) for token in vocabulary.added)).search

    def encode(texts: Sequence[str]) -> tuple[Ids, Lengths]:
        if not any(map(has_added, texts)):
            return plain(texts)
        ids = [library.encode(text).ids if has_added(text) else plain([text])[0] for text in texts]
        return np.concatenate([np.array(each, np.uint32) for each in ids]), np.array([*map(len, ids)], np.int64)

    return encode


class Tokenizer:
    """Encodes and decodes with a vocabulary, loaded on first use. Picklable and thread-safe."""

    def __init__(self, files: VocabularyFiles | Path | None = None) -> None:
        self.files = files or vocabulary_files()

    def __getstate__(self) -> dict[str, VocabularyFiles | Path]:
        return {"files": self.files}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """All tokens and merges. Raises InputError as `read_vocabulary` does."""
        return read_vocabulary(self.files)

    @cached_property
    def _encode(self) -> Encode:
        try:
            plain = _gigatoken(self.vocabulary)
        except ImportError:
            plain = _tiktoken(self.vocabulary)
        return _with_added(self.vocabulary, plain) if self.vocabulary.added else plain

    @property
    def vocab_size(self) -> int:
        """Number of tokens with end-of-text and added ones (50257 for GPT-2), without padding."""
        return self.vocabulary.size

    @property
    def end_of_text(self) -> int:
        """Id of `<|endoftext|>` (50256 for GPT-2)."""
        return self.vocabulary.end_of_text

    @cached_property
    def byte_lengths(self) -> Lengths:
        """Bytes of text per token id, shape (vocab_size,); end-of-text has none."""
        lengths = np.array([*map(len, self.vocabulary.tokens)], np.int64)
        lengths[self.end_of_text] = 0
        return lengths

    def encode(self, text: str) -> Ids:
        """Token ids of one text, shape (tokens,); errors as in `encode_batch`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """The concatenated token ids of texts, and the number of ids per text. Releases the GIL.

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
