"""Megatron-core's own GPTModel, on CPUs: loads a checkpoint strictly, computes logits, and saves.

    python tests/convert/megatron_core_job.py ITER_FOLDER TENSOR PIPELINE OUTPUT [muon|dist_muon]

Writes OUTPUT/logits.pt for the tokens 0 to 19, and as Megatron-LM does OUTPUT/mp_rank_*. A
torch_dist folder is saved as one, with the state of Adam or of Megatron's Muon; dist_muon, its
layer-wise distributed optimizer, has two data ranks.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

TOKENS = 20


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


def build(args: Namespace, tensor: int, pipeline: int, stage: int) -> Any:
    """This rank's part, with NaN everywhere."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    CudaRNGStatesTracker.fork = lambda *_args, **_kwargs: nullcontext()
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        layernorm_epsilon=args.norm_epsilon,
        bias_activation_fusion=args.bias_gelu_fusion,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=args.params_dtype,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == pipeline - 1,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
    )
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model.eval()


def save_logits(model: Any, args: Namespace, stage: int, pipeline: int, path: Path | None) -> None:
    """The model's output from the last stage; no file without a `path`."""
    from megatron.core import parallel_state

    tokens = torch.arange(TOKENS)[None]
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    with torch.no_grad():
        if stage > 0:
            hidden = torch.empty(TOKENS, 1, args.hidden_size)
            dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden)
        result = model(tokens, tokens, mask)
        if stage < pipeline - 1:
            dist.send(result.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        elif path:
            torch.save(result[0, :, : args.vocab_size].clone(), path)


def add_emerging_optimizers() -> None:
    """A stand-in for a package that needs Python 3.12; Megatron's Muon derives from its class.

    Only what it keeps matters here: a step with the learning rate 0 makes no matrix orthogonal.
    """

    class OrthogonalizedOptimizer(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float, momentum_beta: float, **_options: Any) -> None:
            super().__init__(params, {"lr": lr, "momentum_beta": momentum_beta})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1 - group["momentum_beta"])

    package: Any = ModuleType("emerging_optimizers")
    package.__path__ = []
    optimizers: Any = ModuleType("emerging_optimizers.orthogonalized_optimizers")
    optimizers.OrthogonalizedOptimizer, optimizers.get_muon_scale_factor = OrthogonalizedOptimizer, None
    utils: Any = ModuleType("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    utils.newton_schulz_tp = None
    sys.modules |= {module.__name__: module for module in (package, optimizers, utils)}


def make_muon(model: Any, layer_wise: bool) -> Any:
    """Megatron's Muon for matrices, Adam for the rest; the layer-wise one saves bfloat16 only."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    model.ddp_config = DistributedDataParallelConfig()
    model.buffers, model.expert_parallel_buffers = [], []
    config = OptimizerConfig(optimizer="muon", lr=0.0, min_lr=0.0, weight_decay=0.0, muon_momentum=0.75)
    if layer_wise:
        model.bfloat16()
        config.bf16, config.params_dtype = True, torch.bfloat16
    return get_megatron_muon_optimizer(config, [model], layer_wise_distributed_optimizer=layer_wise)


def make_adam(model: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    adam = torch.optim.Adam(model.parameters(), lr=0.0)
    return FP32Optimizer(adam, OptimizerConfig(optimizer="adam", lr=0.0), lambda *_arguments: None)


def save_distributed(model: Any, saved: dict[str, Any], output: Path, name: str) -> None:
    """torch_dist, with the optimizer's state after a step of rate 0; gradients are the weights."""
    from megatron.core.dist_checkpointing import save

    optimizer = make_muon(model, name == "dist_muon") if name else make_adam(model)
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in each.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().clone()
        each.optimizer.step()
    sharded = model.sharded_state_dict(metadata={})
    state = optimizer.sharded_state_dict(sharded, metadata={"chained_optim_avoid_prefix": True})
    save({**saved, "model": sharded, "optimizer": state}, str(output))


def work(rank: int, world: int, source: Path, tensor: int, pipeline: int, output: Path, optimizer: str) -> None:
    torch.set_num_threads(1)
    pretend_cuda()
    add_emerging_optimizers()
    from megatron.core import dist_checkpointing, parallel_state

    dist.init_process_group("gloo", f"file://{output}.store", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tensor, pipeline)
    stage, shard = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    name = f"mp_rank_{shard:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
    distributed = (source / "common.pt").exists()
    content = torch.load(source / ("common.pt" if distributed else f"{name}/model_optim_rng.pt"), weights_only=False)
    args = content["args"]
    model = build(args, tensor, pipeline, stage)
    if distributed:
        content = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(source))
    model.load_state_dict(content["model"], strict=True)
    save_logits(model, args, stage, pipeline, output / "logits.pt" if shard == 0 else None)
    saved = {"args": args, "checkpoint_version": 3.0, "iteration": content["iteration"]}
    if distributed:
        save_distributed(model, saved, output, optimizer)
    else:
        (output / name).mkdir()
        torch.save({**saved, "model": model.state_dict_for_save_checkpoint()}, output / name / "model_optim_rng.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # megatron-core's writer spawns processes that import this file
    source, tensor, pipeline, output, optimizer = (*sys.argv[1:], "")[:5]
    world = int(tensor) * int(pipeline) * (2 if optimizer == "dist_muon" else 1)
    arguments = (world, Path(source), int(tensor), int(pipeline), Path(output), optimizer)
    spawn(work, arguments, nprocs=world)  # type: ignore[no-untyped-call]
