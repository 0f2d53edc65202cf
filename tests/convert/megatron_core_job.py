"""Megatron-core's own GPTModel, on CPUs: loads a checkpoint strictly, computes logits, and saves what it loaded.

    python tests/convert/megatron_core_job.py ITER_FOLDER TENSOR PIPELINE OUTPUT_FOLDER

Writes OUTPUT_FOLDER/logits.pt for the tokens 0 to 19, and as Megatron-LM does OUTPUT_FOLDER/mp_rank_*.
"""

import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

TOKENS = 20


def build(args: Namespace, tensor: int, pipeline: int, stage: int) -> Any:
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
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == pipeline - 1,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
    ).eval()


def work(rank: int, source: Path, tensor: int, pipeline: int, output: Path) -> None:
    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *_args: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]
    from megatron.core import parallel_state

    dist.init_process_group("gloo", f"file://{output / 'store'}", rank=rank, world_size=tensor * pipeline)
    parallel_state.initialize_model_parallel(tensor, pipeline)
    stage, shard = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    name = f"mp_rank_{shard:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
    content = torch.load(source / name / "model_optim_rng.pt", weights_only=False)
    args = content["args"]
    model = build(args, tensor, pipeline, stage)
    model.load_state_dict(content["model"], strict=True)
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
        elif shard == 0:
            torch.save(result[0, :, : args.vocab_size].clone(), output / "logits.pt")
    (output / name).mkdir()
    saved = {"args": args, "checkpoint_version": 3.0, "iteration": content["iteration"]}
    torch.save({**saved, "model": model.state_dict_for_save_checkpoint()}, output / name / "model_optim_rng.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    source, tensor, pipeline, output = sys.argv[1:]
    arguments = (Path(source), int(tensor), int(pipeline), Path(output))
    spawn(work, arguments, nprocs=int(tensor) * int(pipeline))  # type: ignore[no-untyped-call]
