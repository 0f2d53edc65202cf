"""A trained model for use on one device, from a Hugging Face folder, a run, or one of its checkpoints."""

from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from common.console import note
from common.errors import CheckpointError, InputError
from common.settings import ModelSettings
from common.tokenizer import Tokenizer, vocabulary_files
from training import checkpoint
from training.checkpoint import Manifest
from training.huggingface import config as hf_config
from training.huggingface import folder as hf
from training.huggingface import origin as hf_origin
from training.huggingface.tokenizer import true_vocabulary
from training.model import GPT2
from training.parallel.device import keep_freed_memory


def model_from(settings: ModelSettings, weights: dict[str, Tensor]) -> GPT2:
    """A model around existing whole tensors (true vocabulary, our layout), not copied, in evaluation mode."""
    with torch.device("meta"):
        model = GPT2(settings)
    model.load_state_dict(weights, assign=True)
    return model.eval()


def tokenizer_for(manifest: Manifest) -> Tokenizer | None:
    """The tokenizer that a run was configured with; None when the data had another vocabulary.

    Such a model was trained on tokens from elsewhere, and no text can be made of them.
    """
    tokenizer = Tokenizer(vocabulary_files(manifest.tokenize.encoder_json, manifest.tokenize.vocab_bpe))
    same = tokenizer.vocab_size == manifest.experiment.model.vocab_size
    return tokenizer if same and manifest.end_of_text in (None, tokenizer.end_of_text) else None


def split_of(path: Path) -> str | None:
    """The train.split of the run behind a Hugging Face folder, a run or a checkpoint; None where nothing says so."""
    if hf_config.is_folder(path):
        return hf_origin.split_of(path)
    for folder in (path, *checkpoint.iterations(path)):
        with suppress(CheckpointError):
            return checkpoint.read_manifest(folder).experiment.train.split
    return None


def load_model(path: Path, vocab_size: int | None = None) -> tuple[GPT2, Tokenizer | None]:
    """The model in `path` on the GPU where there is one, and its tokenizer where it is known.

    Of a Hugging Face folder, rows of the embedding that are padding are left out, which is said on stderr; `vocab_size`
    is the vocabulary of the data, and counts where the folder has no tokenizer. Raises CheckpointError when the folder
    is neither a Hugging Face GPT-2 nor holds a complete checkpoint.
    """
    if hf_config.is_folder(path):
        settings, weights = hf.read_folder(path)
        tokenizer = hf.read_tokenizer(path)
        rows, true = settings.vocab_size, true_vocabulary(settings.vocab_size, tokenizer, vocab_size)
        if true < rows:
            note(f"{path}: {rows - true} of {rows} embedding rows are no tokens; they are left out")
            settings = settings.model_copy(update={"vocab_size": true})
            weights["wte.weight"] = weights["wte.weight"][:true]
    else:
        manifest = checkpoint.resolve(path)
        settings, weights = manifest.experiment.model, checkpoint.read_weights(manifest)
        tokenizer = tokenizer_for(manifest)
    if torch.cuda.is_available():
        return model_from(settings, weights).to("cuda"), tokenizer
    keep_freed_memory()
    return model_from(settings, weights), tokenizer


def require_tokenizer(tokenizer: Tokenizer | None, path: Path) -> Tokenizer:
    """The tokenizer, or InputError: without one there is no text."""
    if tokenizer is None:
        raise InputError(
            f"{path}: no tokenizer (tokenizer.json, or vocab.json and merges.txt) that fits the model; text needs one"
        )
    return tokenizer
