"""The tokenizer of a Hugging Face folder, and how many rows of its embedding stand for tokens. No torch in here."""

import shutil
from pathlib import Path

from common.errors import InputError
from common.files import write_json
from common.tokenizer import END_OF_TEXT, Tokenizer, TokenizerJson, VocabularyFiles
from common.tokenizer_json import to_json


def write_tokenizer(folder: Path, tokenizer: Tokenizer, seq_len: int) -> None:
    """tokenizer.json, which is all that `transformers` 5 needs, and where there are some the two files of before."""
    vocabulary = tokenizer.vocabulary
    write_json(folder / "tokenizer.json", to_json(vocabulary), indent=False)
    if isinstance(tokenizer.files, VocabularyFiles):
        shutil.copyfile(tokenizer.files.encoder_json, folder / "vocab.json")
        shutil.copyfile(tokenizer.files.vocab_bpe, folder / "merges.txt")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "model_max_length": seq_len,
            "add_prefix_space": False,
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
        },
    )


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None where it has no vocabulary files. They are read on first use."""
    files = VocabularyFiles(folder / "vocab.json", folder / "merges.txt")
    if files.encoder_json.is_file() and files.vocab_bpe.is_file():
        return Tokenizer(files)
    whole = folder / "tokenizer.json"
    return Tokenizer(TokenizerJson(whole)) if whole.is_file() else None


def true_vocabulary(rows: int, tokenizer: Tokenizer | None, wanted: int | None = None) -> int:
    """How many of an embedding's `rows` stand for tokens; those behind them are padding that no text ever holds.

    The tokenizer says so. Without one, rows that are the vocabulary `wanted` (of the data) rounded up to a multiple of
    a power of two are taken for that vocabulary and its padding: 50,304 rows for 50,257 tokens.
    """
    size = vocabulary_size(tokenizer)
    if size is not None:
        return min(size, rows)
    step = rows & -rows  # the largest power of two that divides rows
    return wanted if wanted is not None and 0 < rows - wanted < step else rows


def vocabulary_size(tokenizer: Tokenizer | None) -> int | None:
    """The entries of a tokenizer; None for one that is absent or not GPT-2's (who needs text is told why)."""
    try:
        return tokenizer.vocab_size if tokenizer is not None else None
    except InputError:
        return None
