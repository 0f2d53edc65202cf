"""FLOPs per token by the convention in the log, and the peaks of devices."""

import pytest
import torch

from common.settings import ModelSettings
from training.metrics.peak import peak_of, peak_tflops
from training.planning.flops import flops_per_token

GPT2_345M = ModelSettings(n_layer=24, n_head=16, n_embd=1024)
BF16 = torch.bfloat16


def test_a_token_of_the_345m_model_costs_2_425_gflop() -> None:
    flops = flops_per_token(GPT2_345M)
    assert flops / 1e9 == pytest.approx(2.425, abs=5e-4)
    halved = flops - 6 * 24 * 1024 * 1024  # the other common convention does not count what the causal mask hides
    assert halved / 1e9 == pytest.approx(2.274, abs=5e-4)


def test_a_longer_context_costs_attention_and_no_position_embeddings() -> None:
    longer = GPT2_345M.model_copy(update={"seq_len": 2048})
    assert flops_per_token(longer) - flops_per_token(GPT2_345M) == 12 * 24 * 1024 * 1024


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", BF16, 989),
        ("NVIDIA H100 PCIe", BF16, 756),
        ("NVIDIA H100 NVL", BF16, 835),
        ("NVIDIA H200", BF16, 989),
        ("NVIDIA H200 NVL", BF16, 835),
        ("NVIDIA GH200 480GB", BF16, 989),
        ("NVIDIA B200", BF16, 2250),
        ("NVIDIA GB200", BF16, 2500),
        ("NVIDIA A100-SXM4-80GB", BF16, 312),
        ("NVIDIA A100 80GB PCIe", torch.float16, 312),
        ("NVIDIA L40S", BF16, 362),
        ("NVIDIA RTX A6000", BF16, 154.8),
        ("NVIDIA GeForce RTX 4090", BF16, 165.2),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Tesla V100-PCIE-32GB", torch.float16, 112),
        ("Tesla T4", torch.float16, 65),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        # MIG slices, laptop chips and later devices are not known
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", BF16, 0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", BF16, 0),
        ("NVIDIA A10G", BF16, 0),
        ("NVIDIA Z900", BF16, 0),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name(name: str, precision: torch.dtype, peak: float) -> None:
    assert peak_of(name, precision) == peak


def test_float32_with_tf32_has_a_peak_of_its_own() -> None:
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32, tf32=True) == 156


def test_a_cpu_has_the_peak_from_the_settings() -> None:
    assert peak_tflops(torch.device("cpu"), "auto") == 0
    assert peak_tflops(torch.device("cpu"), "auto", 1.5) == 1.5
