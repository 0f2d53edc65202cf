"""From samples to batches on their way to a device, read by threads ahead of their use.

    numbers = micro_batches(consumed, micro=4, data_rank=0, data_size=2)
    for batch in threaded_map(partial(read_batch, samples, form), numbers, threads=2, in_flight=16):
        loss = summed_loss(model(batch.tokens, batch.positions), batch.targets)

The threads are `common.workers`'.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.model import IGNORED


class Readable(Protocol):
    """Samples or a Blend of them."""

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """Tokens of one sample, shape (seq_len + 1,)."""


@dataclass(frozen=True)
class BatchForm:
    """What a batch is besides tokens and targets (Megatron-LM's options of the same names)."""

    end_of_text: int
    """Id of the token that closes a document."""
    reset_position_ids: bool = False
    """Positions begin at 0 again behind every end-of-text."""
    eod_mask_loss: bool = False
    """No loss where end-of-text is the input: the next document cannot be foreseen."""
    pinned: bool = False
    """Page-locked memory, from which a GPU copies while it computes."""


class Batch(NamedTuple):
    """Some samples, on the CPU until `to`."""

    tokens: Tensor
    """(B, T) int64."""
    targets: Tensor
    """(B, T) int64: the token behind each one, or IGNORED."""
    positions: Tensor | None
    """(B, T) int64; None: 0 to T - 1 in every sample."""
    counted: int
    """Targets that are not IGNORED."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with other tensors."""
        positions = None if self.positions is None else function(self.positions)
        return Batch(function(self.tokens), function(self.targets), positions, self.counted)

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; from pinned memory the copy waits for nothing."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


def read_batch(samples: Readable, form: BatchForm, numbers: Sequence[int]) -> Batch:
    """The samples of these numbers as one batch."""
    tokens = np.stack([samples.sample(number) for number in numbers])
    inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
    ends = inputs == form.end_of_text
    positions = None
    if form.reset_position_ids:
        place = np.arange(inputs.shape[1])
        begins = np.zeros_like(inputs)  # where the document around each token begins
        begins[:, 1:] = np.maximum.accumulate(np.where(ends[:, :-1], place[1:], 0), axis=1)
        positions = torch.from_numpy(place - begins)
    counted = targets.size
    if form.eod_mask_loss:
        targets[ends] = IGNORED
        counted -= int(np.count_nonzero(ends))
    batch = Batch(torch.from_numpy(inputs.copy()), torch.from_numpy(targets), positions, counted)
    return batch.map(Tensor.pin_memory) if form.pinned else batch


def masked(batch: Batch, samples: int) -> Batch:
    """The batch with no loss but in its first `samples`."""
    batch.targets[samples:] = IGNORED
    return batch._replace(counted=int((batch.targets != IGNORED).sum()))


def micro_batches(consumed: int, micro: int, data_rank: int, data_size: int) -> Iterator[range]:
    """The samples of one data-parallel rank from `consumed` on, a range a micro-batch, without end.

    The union of all ranks' next `accumulation` ranges is the next global batch, whatever the layout.
    """
    return (range(first, first + micro) for first in count(consumed + data_rank * micro, data_size * micro))
