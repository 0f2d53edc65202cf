"""A trained model for use on one device, from a Hugging Face folder, a run, or one of its checkpoints."""

from pathlib import Path

import torch
from torch import Tensor

from common.errors import InputError
from common.settings import ModelSettings, TokenizeSettings
from common.tokenizer import Tokenizer, vocabulary_files
from training import checkpoint, hf, hf_config
from training.distributed import keep_freed_memory
from training.model import GPT2


def model_from(settings: ModelSettings, weights: dict[str, Tensor]) -> GPT2:
    """A model around existing whole tensors (true vocabulary, our layout), not copied, in evaluation mode."""
    with torch.device("meta"):
        model = GPT2(settings)
    model.load_state_dict(weights, assign=True)
    model.head.vocab_bias = torch.zeros(settings.vocab_size)  # no padding rows, nothing to mask
    return model.eval()


def tokenizer_for(model: ModelSettings, tokenize: TokenizeSettings) -> Tokenizer | None:
    """The tokenizer that a run was configured with; None when its vocabulary is larger than the model's.

    Such a model was trained on tokens from elsewhere, and no text can be made of them.
    """
    tokenizer = Tokenizer(vocabulary_files(tokenize.encoder_json, tokenize.vocab_bpe))
    return tokenizer if tokenizer.vocab_size <= model.vocab_size else None


def load_model(path: Path) -> tuple[GPT2, Tokenizer | None]:
    """The model in `path` on the GPU where there is one, and its tokenizer where it is known.

    Raises CheckpointError when the folder is neither a Hugging Face GPT-2 nor holds a complete checkpoint.
    """
    if hf_config.is_folder(path):
        settings, weights = hf.read_folder(path)
        tokenizer = hf.read_tokenizer(path)
    else:
        manifest = checkpoint.at(path)
        settings, weights = manifest.run.model, checkpoint.read_weights(manifest)
        tokenizer = tokenizer_for(settings, manifest.tokenize)
    if torch.cuda.is_available():
        return model_from(settings, weights).to("cuda"), tokenizer
    keep_freed_memory()
    return model_from(settings, weights), tokenizer


def require_tokenizer(tokenizer: Tokenizer | None, path: Path) -> Tokenizer:
    """The tokenizer, or InputError: without one there is no text."""
    if tokenizer is None:
        raise InputError(f"{path}: no vocabulary (vocab.json, merges.txt) that fits the model; text needs one")
    return tokenizer
