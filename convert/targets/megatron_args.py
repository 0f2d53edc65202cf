"""The arguments that Megatron-LM reads from a checkpoint: those that it compares, and those that it takes over.

See `check_checkpoint_args` and `load_args_from_checkpoint` in its megatron/training/checkpointing.py.
"""

from typing import Any

import torch

from common.errors import CheckpointError
from convert.sources.ranks import GPT2_VOCABULARY
from convert.sources.source import Source

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the tanh form of GELU."""
ROWS = 128
"""Megatron's make_vocab_size_divisible_by: the embedding has a multiple of this times the tensor ranks."""


def padded_rows(source: Source, tp: int) -> int:
    """Rows of the embedding over all tensor ranks."""
    return -(-source.model.vocab_size // (ROWS * tp)) * ROWS * tp


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
    """The arguments of a training of this model over `tp` tensor ranks and `pp` pipeline stages.

    Raises CheckpointError if Megatron-LM has no such activation.
    """
    model, dtype = source.model, source.tensors["wte.weight"].blocks[0].tensor.dtype
    if model.activation not in (*TANH_GELU, "gelu"):
        raise CheckpointError(f"{source.path}: Megatron-LM's GPT-2 has no activation {model.activation}, only GELU")
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
        "padded_vocab_size": padded_rows(source, tp),
        "make_vocab_size_divisible_by": ROWS,
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
        "bias_gelu_fusion": model.activation in TANH_GELU,
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
