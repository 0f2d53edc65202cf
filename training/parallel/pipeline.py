"""Pipeline parallelism: which layers a process holds, and the schedule of its micro-batches.

    pipeline = Pipeline(stages, experiment, mesh, device)
    loss = pipeline.run(batches, factor, train=True)

A stage holds consecutive layers of a GPT-2; the first one also embeds, the last one computes the
loss. The schedules are PyTorch's: GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019) and
interleaved 1F1B with several stages per process (Narayanan et al. 2021), where stage i is on
process i modulo the number of processes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from common.settings import Experiment
from training.dataset.batches import Batch
from training.kernels.documents import concatenated
from training.loss import LossHead
from training.model import GPT2
from training.parallel.dtensor import local_shard


class Stage(nn.Module):
    """A GPT-2 reduced to the layers of one stage; `model.head` of the last stage is a LossHead."""

    def __init__(self, model: GPT2, layers: range, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.model, self.first, self.last = model, first, last
        removed = [f"h.{layer}" for layer in model.h if int(layer) not in layers]
        removed += ["wpe"] * (not first) + ["ln_f", "head"] * (not last) + ["wte"] * (not first and not last)
        for name in removed:
            parent, _, child = name.rpartition(".")
            delattr(model.get_submodule(parent), child)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        targets: Tensor | None = None,
        factor: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        """(B, T) tokens, or (B, T, C) from the stage before -> (B, T, C), or the summed loss, (1,).

        Each sample's loss is multiplied by its `factor`, (B,). `ends`, (B, K): of documents.
        """
        if self.first:
            x = self.embed(x, positions)
        x = self.model.blocks(x, ends)
        return self.loss(x, targets, factor) if self.last else x

    def keep_rounded_weights(self) -> None:
        """Allocate copies of all matrices in the type of the products, if that is not float32."""
        if self.model.dtype != torch.float32:
            for module, weight in self._multiplied():
                module.rounded = torch.empty_like(local_shard(weight), dtype=self.model.dtype, requires_grad=False)

    @torch.no_grad()
    def round_weights(self) -> None:
        """Round the weights into their copies, if any: before a step's first micro-batch."""
        pairs = [(module.rounded, weight) for module, weight in self._multiplied() if module.rounded is not None]
        if pairs:
            copies, weights = zip(*pairs, strict=True)
            torch._foreach_copy_(copies, [local_shard(weight) for weight in weights])

    def _multiplied(self) -> Iterator[tuple[Any, Any]]:
        """The modules that multiply by a weight, with the weight."""
        for module in self.modules():
            if "rounded" in module._buffers:
                yield module, self.model.wte.weight if isinstance(module, LossHead) else module.weight

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """(B, T), (B, T) or None -> (B, T, C)."""
        return self.model.embed(tokens, positions)

    def loss(self, x: Tensor, targets: Tensor | None, factor: Tensor | None) -> Tensor:
        """(B, T, C), (B, T), (B,) -> the summed loss, shape (1,)."""
        loss: Tensor = self.model.head(self.model.ln_f(x), self.model.wte.weight, targets, factor)
        return loss.reshape(1)


class _FewBuffers(PipelineStage):
    """A 1F1B stage that reuses its receive buffers; PyTorch's has two per micro-batch of a step.

    Activations that are received stay until their backward pass, gradients only during it.
    """

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        in_flight = min(num_microbatches, self.num_stages - self.stage_index)
        super()._setup_forward_recv_info(in_flight, has_backward)
        self.args_recv_info = {chunk: self.args_recv_info[chunk % in_flight] for chunk in range(num_microbatches)}

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self.grad_recv_info = dict.fromkeys(range(num_microbatches), self.grad_recv_info[0])


class Pipeline:
    """Runs the stages of all processes together: `run` is a collective call over the `pp` axis."""

    def __init__(self, stages: Sequence[Stage], experiment: Experiment, mesh: DeviceMesh, device: torch.device) -> None:
        parallel, model = experiment.parallel, experiment.model
        B, T, C = experiment.train.micro_batch_size, model.seq_len, model.n_embd
        rank, slices = mesh.get_local_rank("pp"), parallel.tensor if parallel.sequence_parallel else 1
        tokens = torch.empty(B, T, dtype=torch.long, device="meta")
        hidden = torch.empty(B, T // slices, C, dtype=stages[0].model.dtype, device="meta", requires_grad=True)
        kind = _FewBuffers if parallel.schedule == "1f1b" else PipelineStage
        parts = [
            kind(
                stage,
                rank + index * parallel.pipeline,
                parallel.pipeline * parallel.virtual_stages,
                device,
                input_args=(tokens if stage.first else hidden,),
                output_args=(torch.empty(1, device="meta", requires_grad=True) if stage.last else hidden,),
                group=mesh.get_group("pp"),
            )
            for index, stage in enumerate(stages)
        ]
        self.first, self.last = stages[0].first, stages[-1].last
        self._zero = torch.zeros((), device=device)
        options: dict[str, Any] = {
            "n_microbatches": experiment.accumulation,
            "loss_fn": lambda loss, _targets: loss.sum(),
            "scale_grads": False,
        }
        if parallel.schedule == "interleaved_1f1b":
            self._schedule: Any = ScheduleInterleaved1F1B(list(parts), **options)
        else:
            schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[parallel.schedule]
            self._schedule = schedule(parts[0], **options)

    def run(self, batches: Sequence[Batch], factor: Tensor | float, train: bool) -> Tensor:
        """Run one step's micro-batches; returns their summed losses times `factor`, shape ().

        Forward and, if `train`, backward. Zero except on the processes of the last stage.
        """
        arguments: list[Tensor] = []
        options: dict[str, Any] = {}
        losses: list[Tensor] = []
        if self.first:
            arguments.append(torch.cat([batch.tokens for batch in batches]))
            if batches[0].positions is not None:
                options["positions"] = torch.cat([batch.positions for batch in batches if batch.positions is not None])
        if batches[0].ends is not None:
            options["ends"] = concatenated([batch.ends for batch in batches if batch.ends is not None])
        if self.last:
            options["targets"] = torch.cat([batch.targets for batch in batches])
            options |= {"target": options["targets"], "losses": losses}
            options["factor"] = sample_factors(factor, len(options["targets"]), self._zero.device)
        run = self._schedule.step if train else self._schedule.eval
        run(*arguments, **options, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else self._zero.clone()


def sample_factors(factor: Tensor | float, samples: int, device: torch.device) -> Tensor:
    """The factor of a loss for each of some samples: (samples,), float32."""
    return torch.as_tensor(factor, dtype=torch.float32, device=device).expand(samples)
