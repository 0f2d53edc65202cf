"""Copies are compared bit for bit, and what differs is named with its size."""

import math
from dataclasses import replace

import pytest
import torch

from common.errors import CheckpointError
from convert.sources.consistency import Replicas, compare_replicas
from convert.sources.source import whole
from tests.convert.helpers import LoadedTensor, source_of


def with_copies(tensor: torch.Tensor, *copies: torch.Tensor) -> Replicas:
    """Of a source with one tensor."""
    held = {f"tensor rank {rank}": whole(LoadedTensor(copy)) for rank, copy in enumerate(copies, 1)}
    sharded = replace(whole(LoadedTensor(tensor)), copies=held)
    return compare_replicas(source_of({}, tensors={"ln_f.bias": sharded}))


def test_drift_is_reported_with_tensor_holder_and_size() -> None:
    tensor = torch.zeros(5, 3)
    drifted = tensor.clone()
    drifted[4, 1], drifted[2, 2] = 0.25, -0.5
    found = with_copies(tensor, tensor.clone(), drifted)
    assert found.compared == 2 and found.drifted == {("ln_f.bias", "tensor rank 2"): (2, 0.5)}
    with pytest.raises(CheckpointError, match=r"'ln_f.bias' .*\[4\] .*tensor rank 1 .*\[3\]"):
        with_copies(torch.zeros(3), torch.zeros(4))


def test_every_bit_counts_and_what_is_not_finite_does_not_hide() -> None:
    zero, nan = torch.zeros(3), torch.tensor([0.0, math.nan, 0.0])
    assert not with_copies(nan, nan.clone()).drifted
    assert [*with_copies(zero, -zero).drifted.values()] == [(3, 0.0)]
    for first, second in ((zero, nan), (nan, zero)):
        ((elements, largest),) = with_copies(first, second).drifted.values()
        assert elements == 1 and math.isnan(largest)
    ((_, infinite),) = with_copies(zero, torch.tensor([0.0, math.inf, 1.0])).drifted.values()
    assert infinite == math.inf
    long = torch.zeros(5 << 20)  # more than the rows that are read at a time
    assert [*with_copies(long, torch.cat([long[1:], torch.ones(1)])).drifted.values()] == [(1, 1.0)]
