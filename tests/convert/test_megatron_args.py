"""Megatron's recorded settings: what a GPT-2 needs from them, and what makes a model none."""

from dataclasses import replace
from typing import Any

import pytest

from common.errors import CheckpointError
from convert.arguments import Options
from convert.megatron_args import read_args
from convert.sources.ranks import architecture
from convert.sources.source import Architecture, Recorded
from tests.convert.encoded import SMALL, truth
from tests.convert.helpers import source_of


def read(options: Options | None = None, **args: Any) -> Recorded:
    return read_args(args, options or Options())


def model_of(recorded: Recorded) -> Architecture:
    """Of SMALL's tensors."""
    return architecture(source_of(truth()).tensors, replace(recorded, n_head=8, vocab_size=300))[0]


def test_settings_of_every_age_are_read_and_others_are_gpt2s_constants() -> None:
    none = read()
    assert (none.sizes, none.n_head, none.vocab_size, none.tied) == ({}, None, None, None)
    assert model_of(none) == SMALL
    old = read(num_layers=4, num_attention_heads=8, layernorm_epsilon=1e-6, model_parallel_size=2, hidden_dropout=0)
    assert (old.sizes, old.n_head) == ({"n_layer": ("args.num_layers", 4)}, 8)
    assert replace(SMALL, layer_norm_epsilon=1e-6, dropout=0.0) == model_of(old)
    new = read(norm_epsilon=2e-5)
    assert new.constants["layer_norm_epsilon"] == 2e-5


def test_the_padded_vocabulary_is_not_the_vocabulary() -> None:
    assert read(padded_vocab_size=50304).vocab_size is None
    assert read(Options(vocab_size=300), vocab_size=384).vocab_size == 300
    assert read(vocab_size=50256, tokenizer_type="NullTokenizer").vocab_size == 50257  # and its end of text


@pytest.mark.parametrize(
    ("kernels", "activation"),
    [
        ({"bias_gelu_fusion": True, "openai_gelu": False}, "gelu_new"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu_new"),
        ({"bias_gelu_fusion": False, "openai_gelu": False}, "gelu"),
        ({"openai_gelu": False}, "gelu"),  # before there was a fused GELU
    ],
)
def test_the_activation_is_that_of_the_kernel_that_ran(kernels: dict[str, bool], activation: str) -> None:
    assert read(**kernels).constants["activation"] == activation
    assert read(Options(activation="gelu_new"), **kernels).constants["activation"] == "gelu_new"


@pytest.mark.parametrize(
    "args",
    [
        {"swiglu": True},
        {"position_embedding_type": "rope"},
        {"normalization": "RMSNorm"},
        {"add_bias_linear": False},
        {"num_experts": 2},
        {"group_query_attention": True, "num_query_groups": 2, "num_attention_heads": 8},
        {"kv_channels": 8, "num_attention_heads": 8, "hidden_size": 32},
    ],
    ids=lambda args: next(iter(args)),
)
def test_what_makes_the_model_no_gpt2_is_refused_by_name(args: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"args.{next(iter(args))}"):
        read(**args)


def test_grouped_queries_of_a_group_per_head_are_a_gpt2() -> None:
    assert read(group_query_attention=True, num_query_groups=8, num_attention_heads=8, num_experts=1).n_head == 8


SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "max_position_embeddings")


@pytest.mark.parametrize("name", [*SIZES, "untie_embeddings_and_output_weights"])
def test_what_the_tensors_contradict_is_refused(name: str) -> None:
    value = 64 if name in SIZES else True
    with pytest.raises(CheckpointError, match=f"args.{name}.* is"):
        model_of(read(**{name: value}))
