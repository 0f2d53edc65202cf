"""The tokenizer of a Hugging Face folder, and which embedding rows are tokens. Imports no torch."""

import shutil
from pathlib import Path

from common.errors import InputError
from common.files import write_json, write_text
from common.tokenizer import Tokenizer
from common.vocabulary import END_OF_TEXT, VocabularyFiles, to_json, token_count


def write_tokenizer(folder: Path, tokenizer: Tokenizer, seq_len: int) -> None:
    """Write tokenizer.json for `transformers` 5, vocab.json and merges.txt for older programs."""
    vocabulary, content = tokenizer.vocabulary, to_json(tokenizer.vocabulary)
    added = {str(token.pop("id")): token for token in map(dict, content["added_tokens"])}
    write_json(folder / "tokenizer.json", content, indent=False)
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
            **({"added_tokens_decoder": added} if vocabulary.added else {}),
        },
    )


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None if it has no vocabulary files. They are read on first use."""
    files = VocabularyFiles(folder / "vocab.json", folder / "merges.txt")
    if files.encoder_json.is_file() and files.vocab_bpe.is_file():
        return Tokenizer(files)
    whole = folder / "tokenizer.json"
    return Tokenizer(whole) if whole.is_file() else None


def true_vocabulary(rows: int, folder: Path) -> int:
    """How many `rows` of an embedding are tokens, not padding: all if there is no tokenizer."""
    return min(token_count(folder) or rows, rows)


def vocabulary_size(tokenizer: Tokenizer | None) -> int | None:
    """The size of a tokenizer's vocabulary; None without one, or if it is not GPT-2's."""
    try:
        return tokenizer.vocab_size if tokenizer is not None else None
    except InputError:
        return None


def grown_rows(folder: Path, ours: Tokenizer, rows: int) -> list[int] | None:
    """For each of the `rows` tokens of `ours`, its row in a folder's embedding; -1 for a new token.

    None unless `ours` has all tokens of the folder's tokenizer, and more.
    """
    theirs = read_tokenizer(folder)
    if theirs is None or vocabulary_size(ours) != rows or (vocabulary_size(theirs) or rows) >= rows:
        return None
    ids, known = ours.vocabulary.all_ids, theirs.vocabulary.all_ids
    return [known.get(token, -1) for token in ids] if known.keys() <= ids.keys() else None
