"""Each kernel agrees with PyTorch on the shapes of a run."""

from dataclasses import replace

import pytest
import torch

from training.kernels import library
from training.kernels.cases import Shapes, cases, verify

MODEL = {"seq_len": 24, "n_layer": 2, "n_embd": 32, "vocabulary": 96}
SMALL = Shapes(samples=2, dropout=0.1, dtype="float32", **MODEL)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_kernel_has_a_case_in_which_it_agrees_with_pytorch(dtype: str, device: torch.device) -> None:
    found = {case.kernel: verify(case) for case in cases(replace(SMALL, dtype=dtype), device)}
    assert found == dict.fromkeys(library.KERNELS, "")
