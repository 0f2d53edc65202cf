"""Whole tensors of a source, one after the other, assembled while those before them are written.

Two threads: the caller's writes, the other one reads and transposes. What both hold stays below twice the largest
tensor and 512 MiB; a tensor that would exceed this is assembled after those before it are written.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce

import torch
from torch import Tensor

from common.errors import CheckpointError
from convert.assemble import assemble
from convert.sources.ranks import LINEAR, leaf_of
from convert.sources.source import QKV, Sharded, Source

_SPARE = 512 << 20  # bytes beyond two largest tensors; the bound that docs/convert.md states has twice as many
_AHEAD = 4  # tensors: matrices and biases alternate, so that there is a matrix among them


def widest_dtype(source: Source) -> torch.dtype:
    """The type that holds all values of a source exactly; if all tensors have the same type, that one."""
    found = {block.tensor.dtype for tensor in source.tensors.values() for block in tensor.blocks}
    return reduce(torch.promote_types, found)


def assembled(source: Source, names: Sequence[str], *, qkv: QKV, conv1d: bool, dtype: torch.dtype) -> Iterator[Tensor]:
    """`assemble` for each of `names`. The consumer must not keep a tensor while it asks for the next one.

    Raises CheckpointError naming the tensor if a finite value is infinite in `dtype`.
    """

    def make(name: str) -> Tensor:
        try:
            tensor = assemble(source, name, qkv=qkv, conv1d=conv1d, dtype=dtype)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name!r}: {error}") from None
        _check_range(source, name, tensor)
        return tensor

    sizes = {name: torch.Size(source.tensors[name].shape).numel() * dtype.itemsize for name in names}
    beside = max((_bytes_beside(name, source.tensors[name], dtype) for name in names), default=0)
    room = 2 * max((_bytes(source.tensors[name], dtype) for name in names), default=0) + _SPARE - beside
    waiting = deque(names)
    started: deque[tuple[str, Future[Tensor]]] = deque()
    # one thread for its operations, too: more would compete with the writer
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        held = 0
        try:
            while waiting or started:
                while waiting and (not held or (len(started) <= _AHEAD and held + sizes[waiting[0]] <= room)):
                    name = waiting.popleft()
                    started.append((name, pool.submit(make, name)))
                    held += sizes[name]
                name, future = started.popleft()
                tensor = future.result()
                del future  # it keeps its result
                yield tensor
                del tensor
                held -= sizes[name]
        finally:  # after an error of the writer, too
            pool.shutdown(cancel_futures=True)


def _bytes(tensor: Sharded, dtype: torch.dtype) -> int:
    """Its size in memory, as it is stored or as it is written."""
    stored = max(block.tensor.dtype.itemsize for block in tensor.blocks)
    return torch.Size(tensor.shape).numel() * max(stored, dtype.itemsize)


def _bytes_beside(name: str, tensor: Sharded, dtype: torch.dtype) -> int:
    """What `assemble` holds beside the result: a block, or the matrix that is transposed."""
    blocks = [torch.Size(block.tensor.shape).numel() * block.tensor.dtype.itemsize for block in tensor.blocks]
    if len(blocks) == 1 and tensor.blocks[0].tensor.dtype == dtype:
        blocks = [0]  # read into the result
    turned = torch.Size(tensor.shape).numel() * dtype.itemsize if leaf_of(name) in LINEAR else 0
    return max(*blocks, turned)


def _check_range(source: Source, name: str, tensor: Tensor) -> None:
    """CheckpointError if a finite value became infinite."""
    stored = {block.tensor.dtype for block in source.tensors[name].blocks}
    limit = torch.finfo(tensor.dtype).max
    if all(torch.finfo(dtype).max <= limit for dtype in stored):
        return
    if all(value.isfinite() for value in tensor.aminmax()):  # both are NaN if any value is; much faster than all values
        return
    original = assemble(source, name, qkv=source.qkv, conv1d=source.conv1d)
    largest = original[original.isfinite()].abs().max()
    if largest.to(tensor.dtype).isinf():
        raise CheckpointError(
            f"tensor {name!r}: its largest value, {float(largest):g}, is too large for "
            f"{str(tensor.dtype).removeprefix('torch.')} ({limit:g} at most); choose another --dtype"
        )
