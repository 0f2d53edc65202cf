"""What Megatron's `args` (2020 to today) say about a model, and the settings that make it no GPT-2."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.errors import CheckpointError
from convert.files.inert import Inert
from convert.sources.options import Options
from convert.sources.source import Architecture

# settings that change the arithmetic, and the values of a GPT-2; a setting that is not recorded is not checked
_GPT2: Mapping[str, tuple[Any, ...]] = {
    "swiglu": (False, None),
    "geglu": (False, None),
    "quick_geglu": (False, None),
    "glu_activation": (None,),
    "squared_relu": (False, None),
    "position_embedding_type": ("learned_absolute", "absolute", None),
    "add_position_embedding": (True, None),
    "use_rotary_position_embeddings": (False, None),
    "normalization": ("LayerNorm", None),
    "apply_layernorm_1p": (False, None),
    "layernorm_zero_centered_gamma": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "embed_layernorm": (False, None),
    "qk_layernorm": (False, None),
    "multi_latent_attention": (False, None),
    "window_size": (None,),
    "softmax_type": ("vanilla", None),
    "add_bias_linear": (True, None),
}


@dataclass(frozen=True)
class MegatronArgs:
    """The recorded settings that a merged GPT-2 needs; None for what is not recorded."""

    n_layer: int | None
    n_head: int | None
    n_embd: int | None
    n_inner: int | None
    n_positions: int | None
    vocab_size: int | None
    """True tokens; Megatron's padded_vocab_size is not used."""
    tied: bool | None
    epsilon: float
    dropout: float
    activation: str
    tensor: int | None
    """Tensor-parallel ranks that wrote the checkpoint."""
    pipeline: int | None
    consumed_samples: int | None
    notes: tuple[str, ...]
    """What was assumed, a sentence each."""

    def apply(self, model: Architecture) -> Architecture:
        """`model`, whose sizes come from the tensors, with the recorded constants.

        Raises CheckpointError if a recorded size differs from that of the tensors.
        """
        for recorded, found, flag in (
            (self.n_layer, model.n_layer, "num_layers"),
            (self.n_embd, model.n_embd, "hidden_size"),
            (self.n_inner, model.n_inner, "ffn_hidden_size"),
            (self.n_positions, model.n_positions, "max_position_embeddings"),
        ):
            if recorded is not None and recorded != found:
                raise CheckpointError(
                    f"args.{flag} is {recorded}, but the tensors have {found}; "
                    "files are missing or do not belong together"
                )
        if self.tied is not None and self.tied != model.tied:
            raise CheckpointError(
                f"args.untie_embeddings_and_output_weights is {not self.tied}, but output_layer.weight is "
                f"{'absent' if model.tied else 'present'}; files are missing or do not belong together"
            )
        return replace(model, activation=self.activation, layer_norm_epsilon=self.epsilon, dropout=self.dropout)


def read_args(args: Mapping[str, Any], options: Options) -> MegatronArgs:
    """The settings in `args` (`fields` of the recorded Namespace; empty if there is none) and in `options`.

    Raises CheckpointError naming the setting if the model is no GPT-2.
    """
    for name, accepted in _GPT2.items():
        value = _plain(args.get(name))
        if value not in accepted:
            raise CheckpointError(f"args.{name} is {value!r}: the model is no GPT-2, which has {accepted[0]!r}")
    if (_number(args, "num_experts") or 0) > 1:
        raise CheckpointError(f"args.num_experts is {args['num_experts']}: a mixture of experts is no GPT-2")
    n_head, n_embd = _number(args, "num_attention_heads"), _number(args, "hidden_size")
    if options.num_heads is not None:
        if n_head not in (None, options.num_heads):
            raise CheckpointError(f"--num-heads is {options.num_heads}, but args.num_attention_heads is {n_head}")
        n_head = options.num_heads
    groups = _number(args, "num_query_groups")
    if args.get("group_query_attention") and groups != n_head:
        raise CheckpointError(f"args.group_query_attention with {groups} groups: the model is no GPT-2")
    channels = _number(args, "kv_channels")
    if None not in (channels, n_head, n_embd) and channels * n_head != n_embd:  # type: ignore[operator]
        raise CheckpointError(
            f"args.kv_channels is {channels}: {n_head} heads of that size are no GPT-2 of width {n_embd}"
        )
    untied = _plain(args.get("untie_embeddings_and_output_weights"))
    activation, notes = _activation(args, options)
    dropout, dropout_notes = _dropout(args)
    return MegatronArgs(
        n_layer=_number(args, "num_layers", "encoder_num_layers"),
        n_head=n_head,
        n_embd=n_embd,
        n_inner=_number(args, "ffn_hidden_size"),
        n_positions=_number(args, "max_position_embeddings"),
        vocab_size=options.vocab_size or _vocab_size(args),
        tied=not untied if isinstance(untied, bool) else None,
        epsilon=_float(args, 1e-5, "norm_epsilon", "layernorm_epsilon"),
        dropout=dropout,
        activation=activation,
        tensor=_number(args, "tensor_model_parallel_size", "model_parallel_size"),
        pipeline=_number(args, "pipeline_model_parallel_size"),
        consumed_samples=_number(args, "consumed_train_samples"),
        notes=(*notes, *dropout_notes),
    )


def _activation(args: Mapping[str, Any], options: Options) -> tuple[str, tuple[str, ...]]:
    """Megatron's fused GELU and its openai_gelu are the tanh form; only without both is it PyTorch's erf form."""
    if options.activation:
        return options.activation, ()
    if args.get("openai_gelu") is True or args.get("bias_gelu_fusion"):
        return "gelu_new", ()
    if args.get("bias_gelu_fusion") is not False:
        return "gelu_new", ("activation is not recorded: gelu_new (tanh) assumed (--activation decides)",)
    return "gelu", (
        "activation is gelu (erf), because args.bias_gelu_fusion and args.openai_gelu are off (--activation decides)",
    )


def _dropout(args: Mapping[str, Any]) -> tuple[float, tuple[str, ...]]:
    hidden = _float(args, 0.1, "hidden_dropout")
    attention = _float(args, hidden, "attention_dropout")
    if hidden == attention:
        return hidden, ()
    return hidden, (f"dropout {hidden} is that of the hidden states; the attention's was {attention}",)


def _vocab_size(args: Mapping[str, Any]) -> int | None:
    size = _number(args, "vocab_size")
    # NullTokenizer's end of text comes after the tokens that its --vocab-size counts
    return size + 1 if size and args.get("tokenizer_type") == "NullTokenizer" else size


def _plain(value: Any) -> Any:
    """A setting; the member's value for that of an enumeration, which is read as an inert object."""
    if not isinstance(value, Inert):
        return value
    if value.member:
        return value.member
    # Megatron-DeepSpeed's PositionEmbeddingType: rotary 1, absolute 2, alibi 3
    if value.name.endswith("PositionEmbeddingType") and value.args == (2,):
        return "absolute"
    return value.args[0] if len(value.args) == 1 else f"a {value.name}"


def _number(args: Mapping[str, Any], *names: str) -> int | None:
    return next((value for name in names if type(value := args.get(name)) is int and value > 0), None)


def _float(args: Mapping[str, Any], default: float, *names: str) -> float:
    return next((float(value) for name in names if isinstance(value := args.get(name), int | float)), default)


def json_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are numbers, words or truth values, for a report; no paths."""
    return {
        name: value
        for name in sorted(args)
        if isinstance(value := args[name], bool | int)
        or (isinstance(value, float) and math.isfinite(value))
        or (isinstance(value, str) and "/" not in value)
    }
