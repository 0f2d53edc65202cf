"""Read and write the tokenizer of a Hugging Face folder, and distinguish tokens from padding rows. Imports no torch."""

import shutil
from pathlib import Path

from common.errors import InputError
from common.files import read_json, write_json, write_text
from common.tokenizer import END_OF_TEXT, Tokenizer, VocabularyFiles, to_json


def write_tokenizer(folder: Path, tokenizer: Tokenizer, seq_len: int) -> None:
    """Write tokenizer.json, which `transformers` 5 needs, and vocab.json and merges.txt, which older programs need."""
    vocabulary = tokenizer.vocabulary
    write_json(folder / "tokenizer.json", to_json(vocabulary), indent=False)
    if isinstance(tokenizer.files, VocabularyFiles):
        shutil.copyfile(tokenizer.files.encoder_json, folder / "vocab.json")
        shutil.copyfile(tokenizer.files.vocab_bpe, folder / "merges.txt")
    else:
        write_json(folder / "vocab.json", vocabulary.ids, indent=False)
        write_text(folder / "merges.txt", "\n".join(["#version: 0.2", *vocabulary.merges, ""]))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "model_max_length": seq_len,
            "add_prefix_space": False,
            **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END_OF_TEXT),
        },
    )


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None if it has no vocabulary files. They are read on first use."""
    files = VocabularyFiles(folder / "vocab.json", folder / "merges.txt")
    if files.encoder_json.is_file() and files.vocab_bpe.is_file():
        return Tokenizer(files)
    whole = folder / "tokenizer.json"
    return Tokenizer(whole) if whole.is_file() else None


def true_vocabulary(rows: int, tokenizer: Tokenizer | None) -> int:
    """The number of an embedding's `rows` that are tokens, all without a tokenizer; the rest are padding."""
    size = vocabulary_size(tokenizer)
    return rows if size is None else min(size, rows)


def vocabulary_size(tokenizer: Tokenizer | None) -> int | None:
    """The size of a tokenizer's vocabulary; None if it is absent or not GPT-2's (encoding text with it says why)."""
    try:
        return tokenizer.vocab_size if tokenizer is not None else None
    except InputError:
        return None


def grown_rows(folder: Path, ours: Tokenizer, rows: int) -> list[int] | None:
    """For each of the `rows` tokens of `ours`, its row in a folder's embedding, -1 for a new one.

    None unless `ours` has all tokens of the folder's tokenizer, and more.
    """
    theirs = read_tokenizer(folder)
    if theirs is None or vocabulary_size(ours) != rows or (vocabulary_size(theirs) or rows) >= rows:
        return None
    ids = ours.vocabulary.ids
    if not theirs.vocabulary.ids.keys() <= ids.keys():
        return None
    return [theirs.vocabulary.ids.get(token, -1) for token in sorted(ids, key=ids.__getitem__)]


def token_count(folder: Path) -> int | None:
    """The number of ids in the tokenizer files of a folder, added tokens included.

    None if there are no such files, or none that is understood.
    """
    ids = {-1}
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        try:
            raw = read_json(folder / name)
            if name == "tokenizer.json":
                ids.update(raw["model"]["vocab"].values(), (token["id"] for token in raw.get("added_tokens", [])))
            else:
                ids.update(raw.values())
        except (InputError, OSError, AttributeError, KeyError, TypeError):
            continue
    return max((number for number in ids if isinstance(number, int)), default=-1) + 1 or None
