"""Train tiny models with DeepSpeed on CPU; saves them, and the engine's float32 weights.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 tests/convert/deepspeed_worker.py FOLDER
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
from torch import nn

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


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    zero(Path(sys.argv[1]))
