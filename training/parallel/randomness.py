"""Dropout's random numbers: a pure function of (seed, iteration, rank), so that a resumed run draws the same masks.

Under tensor parallelism two streams a process. The main one is equal on all ranks of a tensor-parallel group, because
they compute the same activations; inside the regions that are split every rank draws numbers of its own, which follow
from its rank and the main stream's state alone, so that a layer that is computed anew draws them again. Under sequence
parallelism everything is split: the main stream itself differs from rank to rank.
"""

import torch
from torch import Tensor, nn

from common.seeds import derive_seed
from training.model import AttentionCore

_STEP = 0x9E3779B97F4A7C15  # odd: the seeds of different ranks differ


class RandomStreams:
    """The random numbers of one process; `attach` once, `start_iteration` before every step.

    `ranks` are what the main stream depends on besides seed and iteration.
    """

    def __init__(self, seed: int, ranks: tuple[int, ...], device: torch.device) -> None:
        self.seed, self.ranks, self.device = seed, ranks, device

    def attach(self, model: nn.Module, tensor_rank: int) -> None:
        """Let the attention weights' dropout, the only dropout inside a split region, draw numbers of its rank."""
        region = _SplitRegion(tensor_rank, self.device)
        for core in (module for module in model.modules() if isinstance(module, AttentionCore)):
            core.register_forward_pre_hook(region.enter)
            core.register_forward_hook(region.leave, always_call=True)

    def start_iteration(self, iteration: int) -> None:
        """Seed the main stream for one optimiser step."""
        torch.manual_seed(derive_seed(self.seed, iteration, *self.ranks))


class _SplitRegion:
    """Swaps the device's generator for that of a tensor-parallel rank, and back."""

    def __init__(self, tensor_rank: int, device: torch.device) -> None:
        self.tensor_rank, self.device = tensor_rank, device
        self._seed = 0
        self._outside: Tensor | None = None

    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator

    def _of_rank(self, seed: int) -> int:
        return (seed + (self.tensor_rank + 1) * _STEP) % 2**63

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, _module: nn.Module, _inputs: object) -> None:
        """Before the region."""
        generator = self._generator()
        if self.device.type == "cuda":  # counter-based: same counter, another key
            self._seed, offset = generator.initial_seed(), generator.get_offset()
            generator.manual_seed(self._of_rank(self._seed))
            generator.set_offset(offset)
            return
        seed = int(torch.randint(2**62, ()))
        self._outside = generator.get_state()
        generator.manual_seed(self._of_rank(seed))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        """After it: the main stream goes on where all ranks are."""
        generator = self._generator()
        if self.device.type == "cuda":
            offset = generator.get_offset()
            generator.manual_seed(self._seed)
            generator.set_offset(offset)
        elif self._outside is not None:
            generator.set_state(self._outside)
