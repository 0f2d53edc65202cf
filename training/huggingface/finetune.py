"""Starting a run from the weights of a Hugging Face GPT-2 instead of random ones (`models.NAME.finetune`).

`check_start` needs no torch: the plan calls it before anything is computed. `load_start` fills any layout.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import CheckpointError, ConfigError
from common.settings import Experiment
from training.huggingface.config import CONFIG, is_folder, read_settings, weight_files
from training.huggingface.tokenizer import read_tokenizer, true_vocabulary, vocabulary_size

if TYPE_CHECKING:
    from torch import nn


def check_start(experiment: Experiment, name: str, folder: Path) -> str:
    """ConfigError when the model `name` cannot start from `folder`: it must have its sizes, and no more positions.

    Positions that a shorter seq_len has no use for are left out, and so are rows of the embedding that are no tokens:
    the returned note says so. Dropout is the run's own.
    """
    key = f"models.{name}.finetune"
    if not is_folder(folder):
        raise ConfigError(
            f"{key}: {folder / CONFIG}: no such file; give a Hugging Face folder (python -m convert.merge_mp makes one)"
        )
    try:
        theirs = read_settings(folder)
        weight_files(folder)
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}") from None
    for size in ("n_layer", "n_head", "n_embd", "seq_len"):
        wanted, found = getattr(experiment.model, size), getattr(theirs, size)
        if wanted > found if size == "seq_len" else wanted != found:
            most = " positions; that many or fewer can be trained" if size == "seq_len" else f"; set it to {found}"
            raise ConfigError(f"models.{name}.model.{size} is {wanted}, but {folder / CONFIG} has {found}{most}")
    wanted, rows = experiment.model.vocab_size, theirs.vocab_size
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
    return f"{rows - true:,} of {rows:,} embedding rows are no tokens and left out" if true < rows else ""


def load_start(parameters: Mapping[str, "nn.Parameter"], experiment: Experiment, folder: Path) -> None:
    """Fill the parameters of this process, by name and in whatever layout; tensors are read one at a time.

    The plan has called `check_start`. Raises CheckpointError for a tensor that is no GPT-2's, on all ranks alike.
    """
    from training.huggingface import folder as hf
    from training.parallel.dtensor import copy_shard_

    tensors = hf.read_tensors(folder)
    try:
        for tensor, whole in hf.each_tensor(tensors, read_settings(folder), parameters):
            used = {"wte.weight": experiment.model.vocab_size, "wpe.weight": experiment.model.seq_len}.get(tensor)
            copy_shard_(parameters[tensor], whole[:used])
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
