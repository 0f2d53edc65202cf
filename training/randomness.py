"""Dropout's random numbers: a pure function of (seed, iteration, rank), so that a resumed run draws the same masks.

Two streams a process. The main one is equal on all tensor-parallel ranks, because they compute the same activations
there; inside the regions that tensor parallelism splits, every rank draws from a stream of its own.
"""

import hashlib

import torch
from torch import Tensor, nn

from training.model import GPT2, AttentionCore


class RandomStreams:
    """The two streams of one process; `attach` once, `start_iteration` before every step."""

    def __init__(self, seed: int, data_rank: int, tensor_rank: int, device: torch.device) -> None:
        self.seed, self.data_rank, self.tensor_rank = seed, data_rank, tensor_rank
        self.device = device
        self._split_region = self._state()
        self._outside = self._split_region

    def attach(self, model: GPT2) -> None:
        """Let the attention weights' dropout, the only dropout inside a split region, use the rank's own stream."""
        for core in (module for module in model.modules() if isinstance(module, AttentionCore)):
            core.register_forward_pre_hook(self._enter)
            core.register_forward_hook(self._leave, always_call=True)

    def start_iteration(self, iteration: int) -> None:
        """Seed both streams for one optimiser step."""
        torch.manual_seed(self._seed_for(iteration, "split", self.tensor_rank))
        self._split_region = self._state()
        torch.manual_seed(self._seed_for(iteration, "main"))

    def _seed_for(self, iteration: int, *stream: object) -> int:
        words = ":".join(map(str, (self.seed, iteration, self.data_rank, *stream)))
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little") >> 1

    def _state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _restore(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def _enter(self, _module: nn.Module, _inputs: object) -> None:
        self._outside = self._state()
        self._restore(self._split_region)

    def _leave(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        self._split_region = self._state()
        self._restore(self._outside)
