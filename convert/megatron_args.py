"""Megatron's `args` in checkpoints (2020 to today): read, and written for Megatron-LM.

Source: megatron/training/checkpointing.py, its check and load of a checkpoint's args.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from common.errors import CheckpointError
from convert.arguments import Options
from convert.pt import Placeholder, enum_member
from convert.sources.consistency import CURE
from convert.sources.ranks import GPT2_VOCABULARY, VOCABULARY_STEP
from convert.sources.source import Recorded, Source
from training.parallel.sizes import padded_vocab_size

# settings that change the arithmetic, with GPT-2's values; only recorded ones are checked
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
_SIZES = {
    "n_layer": ("num_layers", "encoder_num_layers"),
    "n_embd": ("hidden_size",),
    "n_inner": ("ffn_hidden_size",),
    "n_positions": ("max_position_embeddings",),
}


def read_args(args: Mapping[str, Any], options: Options) -> Recorded:
    """The settings in `args` and `options`; CheckpointError naming one that no GPT-2 has."""
    for name, accepted in _GPT2.items():
        value = _plain(args.get(name))
        if value not in accepted:
            raise CheckpointError(f"args.{name} is {value!r}: the model is no GPT-2, which has {accepted[0]!r}")
    if (number(args, "num_experts") or 0) > 1:
        raise CheckpointError(f"args.num_experts is {args['num_experts']}: a mixture of experts is no GPT-2")
    n_head, n_embd = number(args, "num_attention_heads"), number(args, "hidden_size")
    if None not in (n_head, options.num_heads) and n_head != options.num_heads:
        raise CheckpointError(f"--num-heads is {options.num_heads}, but args.num_attention_heads is {n_head}")
    n_head = n_head or options.num_heads
    groups, channels = number(args, "num_query_groups"), number(args, "kv_channels")
    if args.get("group_query_attention") and groups != n_head:
        raise CheckpointError(f"args.group_query_attention with {groups} groups: the model is no GPT-2")
    if channels and n_head and n_embd and channels * n_head != n_embd:
        raise CheckpointError(
            f"args.kv_channels is {channels}: {n_head} heads of that size are no GPT-2 of width {n_embd}"
        )
    sizes: dict[str, tuple[str, int]] = {
        field: (f"args.{names[0]}", size) for field, names in _SIZES.items() if (size := number(args, *names))
    }
    untied = _plain(args.get("untie_embeddings_and_output_weights"))
    if isinstance(untied, bool):
        sizes["tied"] = "tied (not args.untie_embeddings_and_output_weights)", not untied
    activation, notes = _activation(args, options)
    dropout = real(args, 0.1, "hidden_dropout")
    if (attention := real(args, dropout, "attention_dropout")) != dropout:
        notes += (f"dropout is {dropout}, as for hidden states; for attention it was {attention}",)
    tokens = number(args, "vocab_size")
    if tokens and args.get("tokenizer_type") == "NullTokenizer":
        tokens += 1  # its end of text comes after the tokens that its --vocab-size counts
    return Recorded(
        n_head=n_head,
        vocab_size=options.vocab_size or tokens,
        tied=not untied if isinstance(untied, bool) else None,
        sizes=sizes,
        constants={
            "activation": activation,
            "layer_norm_epsilon": real(args, 1e-5, "norm_epsilon", "layernorm_epsilon"),
            "dropout": dropout,
        },
        consumed_samples=number(args, "consumed_train_samples"),
        notes=notes,
    )


def check_ranks(files: Sequence[tuple[Path, Mapping[str, Any], tuple[int, int]]], tensor: int, pipeline: int) -> None:
    """Raises CheckpointError naming a file whose args are those of another rank or layout.

    `files` has a path, its args, and its (tensor rank, pipeline stage) by name, per rank. Equal
    ranks in all files say nothing: a converter wrote them. Ranks count tensor ranks first, then
    context and data ranks, then stages; with use_tp_pp_dp_mapping stages before data ranks. Source:
    megatron/core/parallel_state.py.
    """
    recorded = {path: rank for path, args, _ in files if type(rank := args.get("rank")) is int}
    for path, args, (column, row) in files:
        for name, count in (("tensor_model_parallel_size", tensor), ("pipeline_model_parallel_size", pipeline)):
            if (said := number(args, name)) not in (None, count):
                raise CheckpointError(
                    f"{path}: args.{name} is {said}, but the save has {count}; {CURE}, and of no other"
                )
        if len(set(recorded.values())) < 2 or path not in recorded:
            continue
        rank, world, stage = recorded[path], number(args, "world_size"), row
        if args.get("use_tp_pp_dp_mapping"):
            stage = rank // (tensor * (number(args, "context_parallel_size") or 1)) % pipeline
        elif world and world % (tensor * pipeline) == 0 and rank < world:
            stage = rank // (world // pipeline)
        if (rank % tensor, stage) != (column, row):
            raise CheckpointError(
                f"{path}: was saved by rank {rank}, which is tensor rank {rank % tensor} of pipeline stage {stage}, "
                f"but its name is that of tensor rank {column} of stage {row}; {CURE} to its place"
            )


def check_split(source: Source, tp: int, pp: int) -> None:
    """Raises CheckpointError naming the size that the ranks do not divide."""
    model = source.model
    for flag, parts, what, whole in (
        ("--tp", tp, "heads", model.n_head),
        ("--tp", tp, "columns of the MLP", model.n_inner),
        ("--pp", pp, "layers", model.n_layer),
    ):
        if whole % parts:
            raise CheckpointError(f"{flag} {parts} does not divide the {whole} {what} of {source.path}")


def args_of(source: Source, tp: int, pp: int, ckpt_format: str = "torch") -> dict[str, Any]:
    """The arguments of a training of this model over `tp` tensor ranks and `pp` pipeline stages."""
    model, dtype = source.model, source.tensors["wte.weight"].dtype
    return {
        # sizes
        "num_layers": model.n_layer,
        "encoder_num_layers": model.n_layer,
        "hidden_size": model.n_embd,
        "ffn_hidden_size": model.n_inner,
        "num_attention_heads": model.n_head,
        "kv_channels": model.n_embd // model.n_head,
        "group_query_attention": False,
        "num_query_groups": 1,
        "max_position_embeddings": model.n_positions,
        "seq_length": model.n_positions,
        "encoder_seq_length": model.n_positions,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": padded_vocab_size(model.vocab_size, tp),
        "make_vocab_size_divisible_by": VOCABULARY_STEP,
        "tokenizer_type": "GPT2BPETokenizer" if model.vocab_size == GPT2_VOCABULARY else None,
        # GPT-2's arithmetic
        "position_embedding_type": "learned_absolute",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "normalization": "LayerNorm",
        "layernorm_epsilon": model.layer_norm_epsilon,
        "norm_epsilon": model.layer_norm_epsilon,
        "apply_layernorm_1p": False,
        "apply_residual_connection_post_layernorm": False,
        "apply_query_key_layer_scaling": False,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "bias_gelu_fusion": model.activation != "gelu",
        "openai_gelu": False,
        "swiglu": False,
        "squared_relu": False,
        "num_experts": None,
        "untie_embeddings_and_output_weights": not model.tied,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
        # the files
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "expert_model_parallel_size": 1,
        "ckpt_format": ckpt_format,
        "transformer_impl": "local",
        "use_mcore_models": True,
        "params_dtype": dtype,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        "no_save_optim": True,
        "no_save_rng": True,
        # the training
        "iteration": source.iteration or 0,
        "consumed_train_samples": source.consumed_samples or 0,
        "consumed_valid_samples": 0,
        "data_parallel_random_init": False,
        "phase_transition_iterations": None,
    }


def number(args: Mapping[str, Any], *names: str) -> int | None:
    """The first of these arguments that is a count; None if none is recorded."""
    return next((value for name in names if type(value := args.get(name)) is int and value > 0), None)


def json_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are numbers, words or booleans, for a report; no paths."""
    return {
        name: value
        for name in sorted(args)
        if isinstance(value := args[name], bool | int)
        or (isinstance(value, float) and math.isfinite(value))
        or (isinstance(value, str) and "/" not in value)
    }


def _activation(args: Mapping[str, Any], options: Options) -> tuple[str, tuple[str, ...]]:
    """Megatron's fused GELU and its openai_gelu are the tanh form; otherwise it is the erf form."""
    if options.activation:
        return options.activation, ()
    if args.get("openai_gelu") is True or args.get("bias_gelu_fusion"):
        return "gelu_new", ()
    if args.get("bias_gelu_fusion") is not False and "openai_gelu" not in args:
        return "gelu_new", ("GELU is not recorded: the tanh form, GPT-2's, is assumed (--activation decides)",)
    return "gelu", (
        "GELU is the erf form, as args.bias_gelu_fusion and args.openai_gelu are off; GPT-2's is the tanh form "
        "(--activation decides)",
    )


def _plain(value: Any) -> Any:
    """A setting, or the value of an enumeration's member, which is read as a placeholder."""
    if not isinstance(value, Placeholder):
        return value
    # Megatron-DeepSpeed's PositionEmbeddingType: rotary 1, absolute 2, alibi 3
    if value.name.endswith("PositionEmbeddingType") and value.args == (2,):
        return "absolute"
    return enum_member(value) or (value.args[0] if len(value.args) == 1 else f"a {value.name}")


def real(args: Mapping[str, Any], default: float, *names: str) -> float:
    """The first of these arguments that is a number."""
    return next((float(value) for name in names if isinstance(value := args.get(name), int | float)), default)
