"""Dropout's random numbers: a pure function of (seed, iteration, rank), so that a resumed run draws the same masks.

Under tensor parallelism each process has two streams. The main one is equal on all ranks of a tensor-parallel group,
because they compute the same activations. Inside attention, which is split over the ranks, each rank draws different
numbers; they depend only on its rank and the state of the main stream, so that a recomputed layer draws them again.
Under sequence parallelism all activations are split, and the main stream itself differs between the ranks.
"""

import torch
from torch import Tensor, nn

from common.seeds import derive_seed
from training.model import AttentionCore

_STEP = 0x9E3779B97F4A7C15  # odd, so that different ranks have different seeds


class RandomStreams:
    """The random streams of one process; call `attach` once and `start_iteration` before every step.

    The main stream depends on seed, iteration and `ranks`.
    """

    def __init__(self, seed: int, ranks: tuple[int, ...], device: torch.device) -> None:
        self.seed, self.ranks, self.device = seed, ranks, device

    def attach(self, model: nn.Module, tensor_rank: int) -> None:
        """Let the dropout of attention weights, the only one inside a split region, draw this rank's numbers."""
        region = _RankStream(tensor_rank, self.device)
        for core in (module for module in model.modules() if isinstance(module, AttentionCore)):
            core.register_forward_pre_hook(region.enter)
            core.register_forward_hook(region.leave, always_call=True)

    def start_iteration(self, iteration: int) -> None:
        """Seed the main stream for one optimiser step."""
        torch.manual_seed(derive_seed(self.seed, iteration, *self.ranks))


class _RankStream:
    """Switches the device's generator to the stream of a tensor-parallel rank, and back."""

    def __init__(self, tensor_rank: int, device: torch.device) -> None:
        self.tensor_rank, self.device = tensor_rank, device
        self._seed = 0
        self._main_state: Tensor | None = None

    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator

    def _rank_seed(self, seed: int) -> int:
        return (seed + (self.tensor_rank + 1) * _STEP) % 2**63

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, _module: nn.Module, _inputs: object) -> None:
        """Before the region: switch to this rank's stream."""
        generator = self._generator()
        if self.device.type == "cuda":  # counter-based: same counter, other key
            self._seed, offset = generator.initial_seed(), generator.get_offset()
            generator.manual_seed(self._rank_seed(self._seed))
            generator.set_offset(offset)
            return
        seed = int(torch.randint(2**62, ()))
        self._main_state = generator.get_state()
        generator.manual_seed(self._rank_seed(seed))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        """After it: continue the main stream where all ranks are."""
        generator = self._generator()
        if self.device.type == "cuda":
            offset = generator.get_offset()
            generator.manual_seed(self._seed)
            generator.set_offset(offset)
        elif self._main_state is not None:
            generator.set_state(self._main_state)
