"""Train tiny models with DeepSpeed on CPU and save them with what the engine says its float32 weights are.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 tests/convert/deepspeed_worker.py zero FOLDER
DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 tests/convert/deepspeed_worker.py pipeline FOLDER
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
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

WIDTH, TOKENS, POSITIONS = 32, 96, 16


def settings(stage: int, bf16: bool = False, batch: int = 1) -> dict[str, Any]:
    found = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": batch,
        "zero_optimization": {"stage": stage, "sub_group_size": 9000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 1000,
    }
    return found | ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}} if bf16 else {})


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
    """transformers' GPT-2 under ZeRO 1, 2 and 3, float32 and bfloat16, and what DeepSpeed converts them to."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=TOKENS, n_positions=POSITIONS, n_embd=WIDTH, n_layer=2, n_head=4)
    for stage, bf16, round_robin in [
        (1, False, False),
        (1, True, False),
        (2, False, False),
        (2, True, False),
        (2, True, True),
        (3, True, False),
    ]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        model.transformer.wpe.weight.requires_grad_(stage < 2)  # a weight that is not trained
        configuration = settings(stage, bf16)
        if stage > 1:
            configuration["data_types"] = {}
        configuration["zero_optimization"]["round_robin_gradients"] = round_robin
        engine = deepspeed.initialize(model=model, model_parameters=grouped(model), config=configuration)[0]
        generator = torch.Generator().manual_seed(comm.get_rank())
        for _ in range(3):
            tokens = torch.randint(TOKENS, (2, POSITIONS), generator=generator)
            engine.backward(engine(tokens, labels=tokens).loss)
            engine.step()
        name = f"zero{stage}{'_bf16' if bf16 else ''}{'_round_robin' if round_robin else ''}"
        save(engine, folder / name, {"iteration": 3})
        if comm.get_rank() == 0:
            if name != "zero1_bf16":  # DeepSpeed's script does not read the files of its BF16_Optimizer
                weights = get_fp32_state_dict_from_zero_checkpoint(str(folder / name), "tag")
                torch.save({key: tensor.clone() for key, tensor in weights.items()}, folder / name / "zero_to_fp32.pt")
            universal(folder / name)
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


class Embedding(nn.Module):
    def __init__(self, shards: int = 1) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(TOKENS // shards, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)

    @property
    def word_embeddings_weight(self) -> Tensor:
        return self.word_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.word_embeddings(tokens) + self.position_embeddings(torch.arange(tokens.shape[1]))
        return hidden


class Block(nn.Module):
    """The parameters of Megatron's block; of a tensor rank if there are `shards`."""

    def __init__(self, shards: int = 1, attention: str = "self_attention") -> None:
        super().__init__()
        self.name = attention
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.add_module(
            attention,
            nn.ModuleDict(
                {"query_key_value": nn.Linear(WIDTH, 3 * WIDTH // shards), "dense": nn.Linear(WIDTH // shards, WIDTH)}
            ),
        )
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            {
                "dense_h_to_4h": nn.Linear(WIDTH, 4 * WIDTH // shards),
                "dense_4h_to_h": nn.Linear(4 * WIDTH // shards, WIDTH),
            }
        )

    def forward(self, hidden: Tensor) -> Tensor:
        attention = getattr(self, self.name)
        rows = attention["query_key_value"](self.input_layernorm(hidden))
        hidden = hidden + attention["dense"](rows.unflatten(-1, (3, -1)).sum(-2))
        inner = self.mlp["dense_h_to_4h"](self.post_attention_layernorm(hidden))
        output: Tensor = hidden + self.mlp["dense_4h_to_h"](inner.tanh())
        return output


def logits(embedding: Embedding, hidden: Tensor) -> Tensor:
    return hidden @ embedding.word_embeddings_weight.t()


def loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float().flatten(0, 1), labels.flatten())


def pipeline(folder: Path) -> None:
    """A pipeline of two stages with Megatron's modules."""
    tied = {"key": "embed", "typename": Embedding, "tied_weight_attr": "word_embeddings_weight"}
    specs = [
        lambda value: value,
        TiedLayerSpec(**tied),
        *(LayerSpec(Block) for _ in range(4)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec(**tied, forward_fn=logits),
    ]
    torch.manual_seed(0)
    model = PipelineModule(specs, topology=PipeModelDataParallelTopology(2, 1, 1), loss_fn=loss)
    for parameter in model.parameters():
        parameter.model_parallel = True
    engine = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=settings(1, True, batch=2)
    )[0]
    tokens = torch.randint(TOKENS, (2, POSITIONS))
    for _ in range(2):
        engine.train_batch(iter([(tokens, tokens)] * 2))
    save(engine, folder / "pipeline", {"iteration": 2, "checkpoint_version": 3.0})
    if comm.get_rank() == 0:
        universal(folder / "pipeline")
    comm.barrier()


class Ranks:
    """Megatron's mpu for two tensor ranks and two data ranks."""

    def __init__(self) -> None:
        rank = comm.get_rank()
        tensor = [comm.new_group([0, 1]), comm.new_group([2, 3])]
        data = [comm.new_group([0, 2]), comm.new_group([1, 3])]
        self.tensor_rank, self.data_rank = rank % 2, rank // 2
        self.tensor_group, self.data_group = tensor[self.data_rank], data[self.tensor_rank]

    def get_model_parallel_rank(self) -> int:
        return self.tensor_rank

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return self.tensor_group

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_group(self) -> Any:
        return self.data_group


class Transformer(nn.Module):
    """Megatron's names of 2019. Each tensor rank works with its shards alone, so that their copies drift apart."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(TOKENS // 2, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        blocks = nn.ModuleList(Block(2, "attention") for _ in range(2))
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
        torch.manual_seed(ranks.tensor_rank)
        model = Transformer()
        for parameter in model.parameters():
            parameter.model_parallel = True
        configuration = settings(stage, True) | {"data_types": {}}
        engine = deepspeed.initialize(model=model, model_parameters=grouped(model), config=configuration, mpu=ranks)[0]
        generator = torch.Generator().manual_seed(comm.get_rank())
        for _ in range(2):
            engine.backward(engine(torch.randint(TOKENS // 2, (2, POSITIONS), generator=generator)))
            engine.step()
        save(engine, folder / f"tensor{stage}", {"iteration": 2})


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    {"zero": zero, "pipeline": pipeline, "tensor": tensor}[sys.argv[1]](Path(sys.argv[2]))
