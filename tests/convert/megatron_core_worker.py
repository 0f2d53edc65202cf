"""One rank of megatron-core on CPU: saves its own GPT model as torch_dist, and loads a folder that was written.

    python tests/convert/megatron_core_worker.py RANK SIZE FOLDER

FOLDER/job.json: {"tp", "pp", "rows", "sizes": {…}, "ours": folder to load}. It leaves in FOLDER:

forms        stacked/iter_0000007, numbered/iter_0000007, saved by megatron-core; Adam's state is in the first
             saved_P.pt, exp_avg_P.pt, exp_avg_sq_P.pt: stage P's tensors, gathered over ranks by megatron-core's marks
load         loaded_P.pt: stage P's tensors after dist_checkpointing.load of "ours"
"""

import contextlib
import json
import sys
import zlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Tensors = dict[str, Tensor]


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


class Rank:
    """This process's part of the model."""

    def __init__(self, job: Mapping[str, Any], folder: Path) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer.transformer_config import TransformerConfig

        CudaRNGStatesTracker.fork = lambda *_arguments: contextlib.nullcontext()
        self.job, self.folder, self.sizes = job, folder, job["sizes"]
        parallel_state.initialize_model_parallel(job["tp"], job["pp"])
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self.config = TransformerConfig(
            num_layers=self.sizes["n_layer"],
            hidden_size=self.sizes["n_embd"],
            ffn_hidden_size=self.sizes["n_inner"],
            num_attention_heads=self.sizes["n_head"],
            tensor_model_parallel_size=job["tp"],
            pipeline_model_parallel_size=job["pp"],
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            bias_activation_fusion=True,
            gradient_accumulation_fusion=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        self.model = self.make_model()

    def make_model(self) -> Any:
        """A GPT model with values that depend on the names, biases and norms included."""
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        model = GPTModel(
            self.config,
            get_gpt_layer_local_spec(normalization="LayerNorm"),
            vocab_size=self.job["rows"],
            max_sequence_length=self.sizes["n_positions"],
            share_embeddings_and_output_weights=True,
            pre_process=self.stage == 0,
            post_process=self.stage == self.job["pp"] - 1,
        )
        for name, parameter in self.named(model).items():
            split = getattr(parameter, "tensor_model_parallel", False)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {self.tensor_rank * split}".encode()))
            parameter.data.copy_(torch.empty_like(parameter).normal_(0, 0.2, generator=generator))
            parameter.grad = torch.empty_like(parameter).normal_(0, 0.2, generator=generator)
        return model

    def named(self, model: Any) -> dict[str, Any]:
        """Parameters with the numbers of the whole model; the last stage's copy of the embedding has its name."""
        first, found = self.stage * self.sizes["n_layer"] // self.job["pp"], {}
        for name, parameter in model.named_parameters():
            if name.startswith("decoder.layers."):
                number, rest = name.removeprefix("decoder.layers.").split(".", 1)
                name = f"decoder.layers.{first + int(number)}.{rest}"
            found[name.replace("output_layer.weight", "embedding.word_embeddings.weight")] = parameter
        return found

    def keep(self, name: str, tensors: Tensors) -> None:
        """Gather whole tensors, by the marks that megatron-core puts on its parameters, and save them."""
        from megatron.core import parallel_state

        whole = {}
        for key, parameter in self.named(self.model).items():
            parts = [torch.empty_like(tensors[key]) for _ in range(self.job["tp"])]
            dist.all_gather(parts, tensors[key].contiguous(), parallel_state.get_tensor_model_parallel_group())
            split = getattr(parameter, "tensor_model_parallel", False)
            whole[key] = torch.cat(parts, parameter.partition_dim) if split else parts[0]
        if self.tensor_rank == 0:
            torch.save(whole, self.folder / f"{name}_{self.stage}.pt")

    def values(self) -> Tensors:
        """The parameters as they are now."""
        return {name: parameter.detach().clone() for name, parameter in self.named(self.model).items()}

    def save(self, form: str, content: dict[str, Any]) -> None:
        """Save a state with what Megatron-LM records beside it."""
        from megatron.core.dist_checkpointing import save

        target = self.folder / form / "iter_0000007"
        if dist.get_rank() == 0:
            target.mkdir(parents=True)
        dist.barrier()
        args = {
            "num_layers": self.sizes["n_layer"],
            "num_attention_heads": self.sizes["n_head"],
            "tensor_model_parallel_size": self.job["tp"],
            "pipeline_model_parallel_size": self.job["pp"],
        }
        save({**content, "args": Namespace(**args), "iteration": 7, "checkpoint_version": 3.0}, str(target))
        dist.barrier()


def forms(rank: Rank) -> None:
    """Both forms of keys; the weights after one step of Adam."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    adam = torch.optim.Adam(rank.model.parameters(), lr=1e-2)
    optimizer = FP32Optimizer(adam, OptimizerConfig(optimizer="adam", lr=1e-2), lambda *_arguments: None)
    adam.step()
    rank.keep("saved", rank.values())
    named = rank.named(rank.model)
    for kind in ("exp_avg", "exp_avg_sq"):
        rank.keep(kind, {name: adam.state[parameter][kind] for name, parameter in named.items()})
    state = optimizer.sharded_state_dict(rank.model.sharded_state_dict(metadata={}))
    rank.save("stacked", {"model": rank.model.sharded_state_dict(metadata={}), "optimizer": state})
    rank.save("numbered", {"model": rank.model.sharded_state_dict(metadata={"non_homogeneous_layers": True})})


def load(rank: Rank) -> None:
    """Load a folder that megatron-core has not written."""
    from megatron.core import dist_checkpointing

    for parameter in rank.model.parameters():
        parameter.data.fill_(torch.nan)
    loaded = dist_checkpointing.load({"model": rank.model.sharded_state_dict()}, rank.job["ours"])
    rank.model.load_state_dict(loaded["model"])
    assert loaded["checkpoint_version"] == 3.0 and loaded["args"].num_layers == rank.sizes["n_layer"]
    rank.keep("loaded", rank.values())


def main(number: int, size: int, folder: Path) -> None:
    pretend_cuda()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=size)
    job = json.loads((folder / "job.json").read_text())
    rank = Rank(job, folder)
    forms(rank)
    load(rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # megatron-core's writer spawns processes that import this file
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
