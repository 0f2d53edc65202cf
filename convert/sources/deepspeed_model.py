"""What a DeepSpeed checkpoint says about its model: recorded arguments, a config.json beside it, progress."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.tokenizer import Tokenizer
from convert.files.inert import fields
from convert.sources.deepspeed_files import State
from convert.sources.deepspeed_names import Names
from convert.sources.megatron_args import MegatronArgs, read_args
from convert.sources.options import Options
from convert.sources.ranks import architecture, file_error
from convert.sources.source import Architecture, Sharded
from convert.sources.zero_optimizer import number_in
from training.huggingface.tokenizer import read_tokenizer

# keys of config.json that change the arithmetic, and a GPT-2's value
_GPT2 = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


@dataclass(frozen=True)
class Recorded:
    """The settings that were recorded with the checkpoint; DeepSpeed itself records none."""

    options: Options
    args: MegatronArgs
    """Of Megatron-DeepSpeed; only the options for a model of transformers."""
    config: Mapping[str, Any]
    """The config.json that transformers' Trainer writes beside the tag; empty if there is none."""
    config_path: Path
    vocab_size: int | None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """That of the config.json."""
        return read_tokenizer(self.config_path.parent) if self.config else None

    def describe(
        self, tensors: Mapping[str, Sharded], conv1d: bool, shards: int
    ) -> tuple[Architecture, tuple[str, ...]]:
        """The model, and notes. Raises CheckpointError unless the tensors are a GPT-2 of the recorded sizes."""
        n_head = self.args.n_head or number_in(self.config.get("n_head"))
        model, notes = architecture(tensors, conv1d=conv1d, n_head=n_head, vocab_size=self.vocab_size, shards=shards)
        model = self.args.apply(model)
        if not self.config:
            return model, (*notes, *self.args.notes)
        for key in ("n_layer", "n_embd", "n_positions"):
            if self.config.get(key, getattr(model, key)) != getattr(model, key):
                raise file_error(
                    self.config_path,
                    f"{key} is {self.config[key]}, but {getattr(model, key)} in the tensors; files are missing, or "
                    "this file belongs to another model and must be moved away",
                )
        model = replace(
            model,
            activation=self.options.activation or self.config.get("activation_function", model.activation),
            layer_norm_epsilon=self.config.get("layer_norm_epsilon", model.layer_norm_epsilon),
            dropout=self.config.get("resid_pdrop", model.dropout),
        )
        return model, (*notes, f"heads and constants are those of {self.config_path}")


def read_recorded(folder: Path, state: State, names: Names, options: Options) -> Recorded:
    """The settings beside the weights. Raises CheckpointError if they are not those of a GPT-2."""
    megatron = names.family == "megatron"
    args = read_args(fields(state.get("args")) if megatron else {}, options)
    path, config = (folder / "config.json", {}) if megatron else _config(folder)
    heads = number_in(config.get("n_head"))
    if None not in (heads, options.num_heads) and heads != options.num_heads:
        raise CheckpointError(f"--num-heads is {options.num_heads}, but n_head is {heads} in {path}")
    tokens = fields(state.get("universal_checkpoint_info")).get("original_vocab_size")
    vocab_size = args.vocab_size or number_in(config.get("vocab_size")) or number_in(tokens)
    return Recorded(options, args, config, path, vocab_size)


def progress(folder: Path, state: State) -> tuple[int | None, int | None]:
    """Iterations, and consumed samples."""
    iteration = number_in(state.get("iteration"))
    if iteration is None:
        iteration = number_in(state.get("global_steps"))
    if iteration is None and (found := re.search(r"(\d+)(?:_universal)?$", folder.name)):
        iteration = int(found[1])
    for place in (state, fields(state.get("args"))):
        if (samples := number_in(place.get("consumed_train_samples"))) is not None:
            return iteration, samples
    return iteration, number_in(state.get("global_samples"))  # steps x global batch size


def _config(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """A config.json of a GPT-2 in the tag's folder or in the run's."""
    for path in (folder / "config.json", folder.resolve().parent / "config.json"):
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise file_error(path, f"cannot be read ({error}); mend it or move it away") from None
        if isinstance(config, dict) and config.get("model_type") == "gpt2":
            for key, value in _GPT2.items():
                if config.get(key, value) != value:
                    raise file_error(path, f"{key} is {config[key]}: the model is no GPT-2, which has {value}")
            return path, config
    return folder / "config.json", {}
