"""One rank of megatron-core on CPU: its own GPT model loads a torch_dist folder that we wrote, and saves it again.

    python tests/convert/megatron_core_worker.py RANK SIZE FOLDER

FOLDER/job.json: {"tp", "pp", "rows", "sizes": {…}, "ours": folder to load}. It leaves in FOLDER:

stacked/iter_0000007, numbered/iter_0000007    both forms of keys; in the first one with the state of Adam after a step
                                               with the learning rate 0, whose gradients are the weights
logits.pt                                      {"tokens", activation: logits}, if there is one rank
"""

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def pretend_cuda() -> None:
    """megatron-core asks for a GPU in places that need none."""
    cuda: Any = torch.cuda
    tensor: Any = Tensor
    cuda.synchronize = lambda *_arguments: None
    cuda.current_device = lambda: torch.device("cpu")
    tensor.cuda = lambda self, *_arguments, **_options: self
    real_type = tensor.type
    tensor.type = lambda self, *to: real_type(self, *to) if to else real_type(self).replace("torch.", "torch.cuda.")

    def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments, **options: make(
            *arguments, **{name: value for name, value in options.items() if value != "cuda"}
        )

    for name in ("tensor", "empty", "zeros", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def make_config(job: Mapping[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=job["sizes"]["n_layer"],
        hidden_size=job["sizes"]["n_embd"],
        ffn_hidden_size=job["sizes"]["n_inner"],
        num_attention_heads=job["sizes"]["n_head"],
        tensor_model_parallel_size=job["tp"],
        pipeline_model_parallel_size=job["pp"],
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=True,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def make_model(config: Any, job: Mapping[str, Any]) -> Any:
    """This rank's part, with NaN everywhere."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=job["rows"],
        max_sequence_length=job["sizes"]["n_positions"],
        share_embeddings_and_output_weights=True,
        pre_process=stage == 0,
        post_process=stage == job["pp"] - 1,
    )
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model.eval()


def save_forms(model: Any, job: Mapping[str, Any], folder: Path) -> None:
    """Both forms, with what Megatron-LM records beside the tensors."""
    from megatron.core.dist_checkpointing import save
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    adam = torch.optim.Adam(model.parameters(), lr=0.0)
    optimizer = FP32Optimizer(adam, OptimizerConfig(optimizer="adam", lr=0.0), lambda *_arguments: None)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    adam.step()
    args = Namespace(
        num_layers=job["sizes"]["n_layer"],
        num_attention_heads=job["sizes"]["n_head"],
        tensor_model_parallel_size=job["tp"],
        pipeline_model_parallel_size=job["pp"],
    )
    state = optimizer.sharded_state_dict(model.sharded_state_dict(metadata={}))
    for form, content in (
        ("stacked", {"model": model.sharded_state_dict(metadata={}), "optimizer": state}),
        ("numbered", {"model": model.sharded_state_dict(metadata={"non_homogeneous_layers": True})}),
    ):
        target = folder / form / "iter_0000007"
        target.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        save({**content, "args": args, "iteration": 7, "checkpoint_version": 3.0}, str(target))
        dist.barrier()


def save_logits(model: Any, config: Any, job: Mapping[str, Any], folder: Path) -> None:
    """The model's output with both kinds of GELU."""
    length = job["sizes"]["n_positions"]
    found = {"tokens": torch.arange(2 * length).view(2, -1) * 7 % 300}
    for activation, fused in (("gelu_new", True), ("gelu", False)):
        config.bias_activation_fusion = fused
        with torch.no_grad():
            mask = torch.ones(1, 1, length, length).triu(1).bool()
            found[activation] = model(found["tokens"], torch.arange(length).expand(2, -1), mask)
    torch.save(found, folder / "logits.pt")


def main(number: int, size: int, folder: Path) -> None:
    pretend_cuda()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=size)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_arguments: contextlib.nullcontext()
    job = json.loads((folder / "job.json").read_text())
    parallel_state.initialize_model_parallel(job["tp"], job["pp"])
    config = make_config(job)
    model = make_model(config, job)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, job["ours"])
    model.load_state_dict(loaded["model"])
    assert loaded["checkpoint_version"] == 3.0 and loaded["args"].num_layers == job["sizes"]["n_layer"]
    if size == 1:
        save_logits(model, config, job, folder)
    save_forms(model, job, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # megatron-core's writer spawns processes that import this file
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
