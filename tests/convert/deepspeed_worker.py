"""Train tiny models with DeepSpeed on CPU and save them with what the engine says its float32 weights are.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 tests/convert/deepspeed_worker.py zero FOLDER
DS_ACCELERATOR=cpu torchrun --nproc-per-node 4 tests/convert/deepspeed_worker.py tensor FOLDER
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

WIDTH, TOKENS, POSITIONS = 32, 96, 16


def settings(stage: int, bf16: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "sub_group_size": 9000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": bf16},
    }


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices alone, as usual."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def save(engine: Any, folder: Path, state: dict[str, Any]) -> None:
    """The checkpoint, and beside it what the engine says of this rank's float32 weights."""
    engine.save_checkpoint(str(folder), tag="tag", client_state=state)
    trained = [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    truth = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in trained}
    torch.save(truth, folder / f"truth_{comm.get_rank()}.pt")
    comm.barrier()


def zero(folder: Path) -> None:
    """transformers' GPT-2 under ZeRO 1, 2 and 3, and what DeepSpeed itself converts them to."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=TOKENS, n_positions=POSITIONS, n_embd=WIDTH, n_layer=2, n_head=4)
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        model.transformer.wpe.weight.requires_grad_(stage < 2)  # a weight that is not trained
        options = settings(stage, bf16=stage > 1)
        engine = deepspeed.initialize(model=model, model_parameters=grouped(model), config=options)[0]
        generator = torch.Generator().manual_seed(comm.get_rank())
        for _ in range(3):
            tokens = torch.randint(TOKENS, (2, POSITIONS), generator=generator)
            engine.backward(engine(tokens, labels=tokens).loss)
            engine.step()
        path = folder / f"zero{stage}"
        save(engine, path, {"iteration": 3})
        if comm.get_rank() == 0:
            weights = get_fp32_state_dict_from_zero_checkpoint(str(path), "tag")
            torch.save({key: tensor.clone() for key, tensor in weights.items()}, path / "zero_to_fp32.pt")
            universal(path)
        comm.barrier()


def universal(folder: Path) -> None:
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder / "tag"),
            output_folder=str(folder / "tag_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=False,
            inject_missing_state=True,
        )
    )


class Block(nn.Module):
    """The parameters of Megatron's block on one of two tensor ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        rows, columns = nn.Linear(WIDTH, 3 * WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH)
        self.attention = nn.ModuleDict({"query_key_value": rows, "dense": columns})
        rows, columns = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = nn.ModuleDict({"dense_h_to_4h": rows, "dense_4h_to_h": columns})

    def forward(self, hidden: Tensor) -> Tensor:
        rows = self.attention["query_key_value"](self.input_layernorm(hidden))
        hidden = hidden + self.attention["dense"](rows.unflatten(-1, (3, -1)).sum(-2))
        inner = self.mlp["dense_h_to_4h"](self.post_attention_layernorm(hidden))
        output: Tensor = hidden + self.mlp["dense_4h_to_h"](inner.tanh())
        return output


class Ranks:
    """Megatron's mpu for two tensor ranks and two data ranks."""

    def __init__(self) -> None:
        rank = comm.get_rank()
        tensor = [comm.new_group([0, 1]), comm.new_group([2, 3])]
        data = [comm.new_group([0, 2]), comm.new_group([1, 3])]
        self.get_model_parallel_rank = lambda: rank % 2
        self.get_data_parallel_rank = lambda: rank // 2
        self.get_model_parallel_world_size = self.get_data_parallel_world_size = lambda: 2
        self.get_model_parallel_group = lambda: tensor[rank // 2]
        self.get_data_parallel_group = lambda: data[rank % 2]


class Transformer(nn.Module):
    """Megatron's names of 2019. Each tensor rank works with its shards alone, so that their copies drift apart."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(TOKENS // 2, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        blocks = nn.ModuleList(Block() for _ in range(2))
        self.transformer = nn.ModuleDict({"layers": blocks, "final_layernorm": nn.LayerNorm(WIDTH)})

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.word_embeddings(tokens) + self.position_embeddings(torch.arange(POSITIONS))
        for block in self.transformer["layers"]:
            hidden = block(hidden)
        output: Tensor = self.transformer["final_layernorm"](hidden)
        return (output.float() * torch.arange(WIDTH)).square().mean()


def tensor(folder: Path) -> None:
    """Two tensor ranks by two data ranks under ZeRO 1, 2 and 3."""
    ranks = Ranks()
    for stage in (1, 2, 3):
        torch.manual_seed(ranks.get_model_parallel_rank())
        model = Transformer()
        for parameter in model.parameters():
            parameter.model_parallel = True
        engine = deepspeed.initialize(
            model=model, model_parameters=grouped(model), config=settings(stage, bf16=True), mpu=ranks
        )[0]
        generator = torch.Generator().manual_seed(comm.get_rank())
        for _ in range(2):
            engine.backward(engine(torch.randint(TOKENS // 2, (2, POSITIONS), generator=generator)))
            engine.step()
        save(engine, folder / f"tensor{stage}", {"iteration": 2})


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    {"zero": zero, "tensor": tensor}[sys.argv[1]](Path(sys.argv[2]))
