"""FLOPs per token by the convention in the log, and the peaks of devices."""

import pytest
import torch

from common.settings import ModelSettings
from training.metrics.peak import peak_of, peak_tflops
from training.planning.flops import flops_per_token

GPT2_345M = ModelSettings(n_layer=24, n_head=16, n_embd=1024)


def test_a_token_of_the_345m_model_costs_2_425_gflop_and_a_longer_context_only_attention() -> None:
    flops = flops_per_token(GPT2_345M)
    assert flops / 1e9 == pytest.approx(2.425, abs=5e-4)
    longer = GPT2_345M.model_copy(update={"seq_len": 2048})
    assert flops_per_token(longer) - flops == 12 * 24 * 1024 * 1024


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("Tesla V100-PCIE-32GB", torch.float16, 112),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        # MIG slices, laptop chips and later devices are not known
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, 0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, 0),
        ("NVIDIA A10G", torch.bfloat16, 0),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name(name: str, precision: torch.dtype, peak: float) -> None:
    assert peak_of(name, precision) == peak


def test_tf32_has_a_peak_of_its_own_and_a_cpu_the_one_from_the_settings() -> None:
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32, tf32=True) == 156
    assert peak_tflops(torch.device("cpu"), "auto") == 0
    assert peak_tflops(torch.device("cpu"), "auto", 1.5) == 1.5
