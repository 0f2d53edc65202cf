"""Loads a trained model on one device: from a Hugging Face folder, a model folder or a checkpoint.

A variant of GPT-2, which is used and never trained, changes the model before it gets its weights.
"""

from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.console import note
from common.errors import CheckpointError, InputError
from common.settings import ModelSettings
from common.tokenizer import Tokenizer
from common.vocabulary import vocabulary_files
from training import checkpoint
from training.checkpoint import Manifest
from training.huggingface.config import Variant, is_pretrained_folder
from training.huggingface.origin import Origin, read_origin
from training.huggingface.pretrained import load_pretrained
from training.huggingface.tokenizer import read_tokenizer, true_vocabulary
from training.launch.device import keep_freed_memory
from training.model import GPT2, MLP, GeluLinear, Head, LayerNorm, Linear
from training.model_folder import checkpoint_folders
from training.tensors import HEAD, VOCABULARY


def model_from_weights(settings: ModelSettings, weights: dict[str, Tensor], variant: Variant | None = None) -> GPT2:
    """A model in evaluation mode on `weights`, full tensors in our layout, without a copy."""
    with torch.device("meta"):
        model = GPT2(settings)
        if variant is not None:
            become(model, variant)
    own = {"head.weight" if name == HEAD else name: weight for name, weight in weights.items()}
    model.load_state_dict(own, assign=True)
    return model.eval()


def tokenizer_for(manifest: Manifest) -> Tokenizer | None:
    """The tokenizer of the run; None if the data have another vocabulary."""
    tokenizer = Tokenizer(vocabulary_files(manifest.tokenize.encoder_json, manifest.tokenize.vocab_bpe))
    same = tokenizer.vocab_size == manifest.experiment.model.vocab_size
    return tokenizer if same and manifest.end_of_text == tokenizer.end_of_text else None


def origin_in(manifest: Manifest) -> Origin:
    """The origin that a checkpoint records."""
    facts = {**manifest.train.model_dump(), "data": manifest.data}
    return Origin.of_facts(manifest.iteration, manifest.consumed_samples, facts)


def origin_of(path: Path) -> Origin:
    """The recorded origin of a model; empty for a folder from elsewhere."""
    if is_pretrained_folder(path):
        return read_origin(path) or Origin()
    for folder in (path, *checkpoint_folders(path)):
        with suppress(CheckpointError):
            return origin_in(checkpoint.read_manifest(folder))
    return Origin()


def load_model(path: Path) -> tuple[GPT2, Tokenizer | None]:
    """The model in `path`, on the GPU if there is one, and its tokenizer if it is known.

    Leaves out padding rows of a Hugging Face embedding, with a note on stderr. Raises
    CheckpointError if `path` is no Hugging Face GPT-2 and has no complete checkpoint.
    """
    variant = None
    if is_pretrained_folder(path):
        settings, variant, weights = load_pretrained(path)
        tokenizer = read_tokenizer(path)
        rows, true = settings.vocab_size, true_vocabulary(settings.vocab_size, path)
        if true < rows:
            note(f"{path}: {rows - true} of {rows} embedding rows are padding; they are left out")
            settings = settings.model_copy(update={"vocab_size": true})
            weights |= {name: weights[name][:true] for name in VOCABULARY if name in weights}
    else:
        manifest = checkpoint.resolve(path)
        settings, weights, tokenizer = manifest.model, checkpoint.load_weights(manifest), tokenizer_for(manifest)
    model = model_from_weights(settings, weights, variant)
    if torch.cuda.is_available():
        return model.to("cuda"), tokenizer
    keep_freed_memory()
    return model, tokenizer


def require_tokenizer(tokenizer: Tokenizer | None, path: Path) -> Tokenizer:
    """The tokenizer. Raises InputError if there is none."""
    if tokenizer is None:
        raise InputError(
            f"{path}: no tokenizer (tokenizer.json, or vocab.json and merges.txt) that fits the model; text needs one"
        )
    return tokenizer


class ExactGeluLinear(GeluLinear):
    """A matrix product and exact GELU."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out)."""
        return F.gelu(Linear.forward(self, x))


class UntiedHead(Head):
    """Logits by a weight of its own."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """(B, T, C), unused (V, C) of the embedding -> (B, T, V)."""
        return super().forward(x, self.weight)


def become(model: GPT2, variant: Variant) -> None:
    """Turn a model that has no weights yet into the variant."""
    width = model.settings.n_embd
    for module in model.modules():
        if isinstance(module, MLP):
            module.c_fc = (ExactGeluLinear if variant.exact_gelu else GeluLinear)(width, variant.n_inner)
            module.c_proj = Linear(variant.n_inner, width)
        elif isinstance(module, LayerNorm):
            module.eps = variant.layer_norm_epsilon
    if not variant.tied:
        model.head = UntiedHead(model.settings.vocab_size, width)
