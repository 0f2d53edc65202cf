"""Turn samples into batches, which threads prefetch.

numbers = micro_batches(consumed, micro=4, data_rank=0, data_size=2)
for batch in threaded_map(partial(read_batch, samples, form), numbers, 2, in_flight=16):
    loss = summed_loss(model(batch.tokens, batch.positions, batch.ends), batch.targets)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.kernels.documents import document_ends
from training.loss import IGNORED


class Readable(Protocol):
    """Samples or a Blend of them."""

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """The tokens of one sample, shape (seq_len + 1,)."""


class TokenSource(Readable, Protocol):
    """Samples without end: a Blend, or random tokens."""

    @property
    def end_of_text(self) -> int:
        """Id of the token that ends a document."""


@dataclass(frozen=True)
class BatchForm:
    """How a batch is made from samples (Megatron-LM's options of the same names)."""

    end_of_text: int  # id of the token that ends a document
    reset_position_ids: bool = False  # positions restart at 0 after every end-of-text
    reset_attention_mask: bool = False  # tokens attend within their document
    eod_mask_loss: bool = False  # no loss where the input is end-of-text
    pinned: bool = False  # page-locked memory, so that the copy to a GPU is asynchronous


class Batch(NamedTuple):
    """A batch of samples; `to` moves it to a device."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64: the next token of each, or IGNORED
    positions: Tensor | None  # (B, T) int64; None for 0 to T - 1 in every sample
    ends: Tensor | None  # (B, K) int64, of documents; None: tokens attend to all before them
    counted: int  # targets that are not IGNORED

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with `function` applied to each tensor."""
        tensors: dict[str, Any] = {
            name: function(tensor) for name, tensor in self._asdict().items() if isinstance(tensor, Tensor)
        }
        return self._replace(**tensors)

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; from pinned memory the copy is asynchronous."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


def read_batch(samples: Readable, form: BatchForm, numbers: Sequence[int]) -> Batch:
    """The samples with these numbers as one batch."""
    return make_batch(np.stack([samples.sample(number) for number in numbers]), form)


def make_batch(tokens: npt.NDArray[np.int64], form: BatchForm) -> Batch:
    """(B, T + 1) tokens as a batch."""
    inputs, targets = tokens[:, :-1], targets_of(tokens, form)
    positions = None
    if form.reset_position_ids:
        index = np.arange(inputs.shape[1])
        begins = np.zeros_like(inputs)  # index at which each token's document begins
        last = inputs[:, :-1] == form.end_of_text
        begins[:, 1:] = np.maximum.accumulate(np.where(last, index[1:], 0), axis=1)
        positions = torch.from_numpy(index - begins)
    counted = int(np.count_nonzero(targets != IGNORED))
    ends = document_ends(inputs, form.end_of_text) if form.reset_attention_mask else None
    batch = Batch(torch.from_numpy(inputs.copy()), torch.from_numpy(targets), positions, ends, counted)
    return batch.map(Tensor.pin_memory) if form.pinned else batch


def targets_of(tokens: npt.NDArray[np.int64], form: BatchForm) -> npt.NDArray[np.int64]:
    """(B, T + 1) tokens -> (B, T): the next token of each, or IGNORED.

    End-of-text after end-of-text is never a target: `workflow.provenance.remove` leaves such ones.
    """
    targets = tokens[:, 1:].copy()
    ends = tokens[:, :-1] == form.end_of_text
    targets[ends if form.eod_mask_loss else ends & (targets == form.end_of_text)] = IGNORED
    return targets


def prefetch_to_device(steps: Iterable[list[Batch]], device: torch.device) -> Iterator[list[Batch]]:
    """The batches of each step on a GPU, copied from pinned memory during the step before."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copied: list[Batch] | None = None

    def ready(step: list[Batch]) -> list[Batch]:
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(side)
        for tensor in (tensor for batch in step for tensor in batch if isinstance(tensor, Tensor)):
            tensor.record_stream(stream)  # its memory is not reused before this stream has read it
        return step

    for step in steps:
        with torch.cuda.stream(side):
            following = [batch.to(device) for batch in step]
        if copied is not None:
            yield ready(copied)
        copied = following
    if copied is not None:
        yield ready(copied)


def masked(batch: Batch, samples: int) -> Batch:
    """The batch with the targets after its first `samples` samples set to IGNORED, in place."""
    batch.targets[samples:] = IGNORED
    return batch._replace(counted=int((batch.targets != IGNORED).sum()))


def micro_batches(consumed: int, micro: int, data_rank: int, data_size: int) -> Iterator[range]:
    """One data-parallel rank's sample numbers from `consumed` on: endless, a range per micro-batch.

    In every layout the next `accumulation` ranges of all ranks together are the next global batch.
    """
    return (range(first, first + micro) for first in count(consumed + data_rank * micro, data_size * micro))
