"""Start a run from the weights of a Hugging Face GPT-2 (`models.NAME.finetune`) instead of random ones.

`check_finetune` imports no torch, so that the plan is checked first; `load_finetune` fills any layout.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import CheckpointError, ConfigError
from common.settings import ModelSettings
from training.huggingface.config import CONFIG, is_pretrained_folder, read_config, weight_files
from training.huggingface.tokenizer import read_tokenizer, true_vocabulary, vocabulary_size

if TYPE_CHECKING:
    from torch import nn


def check_finetune(model: ModelSettings, name: str, folder: Path) -> str:
    """Check that the model `name` can start from `folder`. Returns a note about unused embedding rows, often empty.

    The sizes must be equal; seq_len and the vocabulary may be smaller, and the surplus rows are left out. Dropout is
    taken from the run's settings. Raises ConfigError.
    """
    key = f"models.{name}.finetune"
    if not is_pretrained_folder(folder):
        raise ConfigError(
            f"{key}: {folder / CONFIG}: no such file; give a Hugging Face folder (python -m convert.merge_mp makes one)"
        )
    try:
        theirs = read_config(folder)
        weight_files(folder)
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}") from None
    for size in ("n_layer", "n_head", "n_embd", "seq_len"):
        wanted, found = getattr(model, size), getattr(theirs, size)
        if wanted > found if size == "seq_len" else wanted != found:
            most = " positions; that many or fewer can be trained" if size == "seq_len" else f"; set it to {found}"
            raise ConfigError(f"models.{name}.model.{size} is {wanted}, but {folder / CONFIG} has {found}{most}")
    wanted, rows = model.vocab_size, theirs.vocab_size
    tokenizer = read_tokenizer(folder)
    true = true_vocabulary(rows, tokenizer, wanted)
    if true != wanted:
        known = vocabulary_size(tokenizer) is not None
        raise ConfigError(
            f"models.{name}.model.vocab_size is {wanted}, but {folder} has {true}"
            + (" tokens" if known else " embedding rows, and no tokenizer.json that says how many of them are padding")
            + f"; set it to {true} if the data were tokenized with that vocabulary, else tokenize them with it "
            "(tokenize.encoder_json, tokenize.vocab_bpe) or start from another folder"
        )
    return f"{rows - true:,} of {rows:,} embedding rows are padding and left out" if true < rows else ""


def load_finetune(parameters: Mapping[str, "nn.Parameter"], model: ModelSettings, folder: Path) -> None:
    """Fill this rank's parameters, in any layout, one tensor at a time.

    `check_finetune` has accepted the folder. Raises CheckpointError on all ranks if its tensors are not a GPT-2's.
    """
    from training.huggingface.pretrained import convert_tensors, read_tensors
    from training.parallel.dtensor import copy_shard_

    tensors = read_tensors(folder)
    try:
        for tensor, whole in convert_tensors(tensors, read_config(folder), parameters):
            used = {"wte.weight": model.vocab_size, "wpe.weight": model.seq_len}.get(tensor)
            copy_shard_(parameters[tensor], whole[:used])
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
