"""Megatron's recorded settings: what a GPT-2 needs from them, and what makes a model none."""

import argparse
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError
from convert.files.inert import fields, load_inert
from convert.sources.megatron_args import MegatronArgs, json_args, read_args
from convert.sources.options import Options
from tests.convert.encoded import SMALL


def read(options: Options | None = None, **args: Any) -> MegatronArgs:
    return read_args(args, options or Options())


def test_nothing_recorded_leaves_gpt2s_constants() -> None:
    found = read()
    assert (found.n_layer, found.n_head, found.vocab_size, found.tied) == (None, None, None, None)
    assert found.apply(SMALL) == SMALL


def test_settings_of_every_age_are_read() -> None:
    old = read(num_layers=4, num_attention_heads=8, layernorm_epsilon=1e-6, model_parallel_size=2, hidden_dropout=0)
    assert (old.n_layer, old.n_head, old.epsilon, old.tensor, old.pipeline) == (4, 8, 1e-6, 2, None)
    new = read(norm_epsilon=2e-5, tensor_model_parallel_size=4, pipeline_model_parallel_size=2)
    assert (new.epsilon, new.tensor, new.pipeline) == (2e-5, 4, 2)
    assert replace(SMALL, layer_norm_epsilon=1e-6, dropout=0.0) == old.apply(SMALL)
    assert read(hidden_dropout=0.1, attention_dropout=0.2, openai_gelu=True).notes == (
        "dropout 0.1 is that of the hidden states; the attention's was 0.2",
    )


def test_the_padded_vocabulary_is_not_the_vocabulary() -> None:
    assert read(padded_vocab_size=50304).vocab_size is None
    assert read(padded_vocab_size=50304, vocab_size=50257).vocab_size == 50257
    assert read(Options(vocab_size=300), vocab_size=384).vocab_size == 300
    assert read(vocab_size=50256, tokenizer_type="NullTokenizer").vocab_size == 50257


@pytest.mark.parametrize(
    ("args", "activation"),
    [
        ({}, "gelu_new"),
        ({"bias_gelu_fusion": True}, "gelu_new"),
        ({"bias_gelu_fusion": True, "openai_gelu": False}, "gelu_new"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu_new"),
        ({"bias_gelu_fusion": False, "openai_gelu": False}, "gelu"),
        ({"bias_gelu_fusion": False}, "gelu"),
    ],
)
def test_the_activation_is_that_of_the_kernel_that_ran(args: dict[str, Any], activation: str) -> None:
    found = read(**args)
    assert found.activation == activation and len(found.notes) == (activation == "gelu" or not args)
    assert not read(Options(activation="gelu_new"), **args).notes
    assert read(Options(activation="gelu_new"), **args).activation == "gelu_new"


@pytest.mark.parametrize(
    "args",
    [
        {"swiglu": True},
        {"squared_relu": True},
        {"quick_geglu": True},
        {"position_embedding_type": "rope"},
        {"position_embedding_type": "none"},
        {"use_rotary_position_embeddings": True},
        {"add_position_embedding": False},
        {"normalization": "RMSNorm"},
        {"apply_layernorm_1p": True},
        {"layernorm_zero_centered_gamma": True},
        {"apply_residual_connection_post_layernorm": True},
        {"add_bias_linear": False},
        {"qk_layernorm": True},
        {"num_experts": 8},
        {"group_query_attention": True, "num_query_groups": 2, "num_attention_heads": 8},
        {"kv_channels": 8, "num_attention_heads": 8, "hidden_size": 32},
    ],
)
def test_what_makes_the_model_no_gpt2_is_refused_by_name(args: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"args.{next(iter(args))} .*no GPT-2") as error:
        read(**args)
    assert "\n" not in str(error.value)


def test_grouped_queries_with_a_group_per_head_are_ordinary_heads() -> None:
    assert read(group_query_attention=True, num_query_groups=8, num_attention_heads=8).n_head == 8
    assert read(num_query_groups=1, num_attention_heads=8).n_head == 8  # the default, unused


def test_heads_may_be_given_but_not_against_the_record() -> None:
    assert read(Options(num_heads=8)).n_head == 8
    assert read(Options(num_heads=8), num_attention_heads=8).n_head == 8
    with pytest.raises(CheckpointError, match=r"--num-heads is 4, but args.num_attention_heads is 8"):
        read(Options(num_heads=4), num_attention_heads=8)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"num_layers": 5}, "args.num_layers is 5, but the tensors have 4"),
        ({"hidden_size": 64}, "args.hidden_size is 64, but the tensors have 32"),
        ({"max_position_embeddings": 1024}, "args.max_position_embeddings is 1024, but the tensors have 24"),
        ({"untie_embeddings_and_output_weights": True}, "output_layer.weight is absent"),
    ],
)
def test_sizes_that_the_tensors_contradict_are_refused(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read(**args).apply(SMALL)


class PositionEmbeddingType(Enum):
    rotary = 1
    absolute = 2


@pytest.mark.parametrize("kind", PositionEmbeddingType)
def test_an_enumeration_is_understood_without_its_class(tmp_path: Path, kind: PositionEmbeddingType) -> None:
    """Megatron-DeepSpeed records the kind of positions as a member of its own class."""
    torch.save(argparse.Namespace(position_embedding_type=kind, seed=1, dtype=torch.half), tmp_path / "args.pt")
    args = fields(load_inert(tmp_path / "args.pt"))
    assert json_args(args) == {"seed": 1}
    if kind is PositionEmbeddingType.absolute:
        read_args(args, Options())
    else:
        with pytest.raises(CheckpointError, match=r"args.position_embedding_type is (1|'rotary')"):
            read_args(args, Options())
