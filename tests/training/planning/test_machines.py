"""The kinds of GPUs: what is known of each, how a device is recognised, and the machines that are planned for."""

import re

import pytest

from training.planning.machines import GIB, gpu_of_device, known_gpus, machine, this_gpu

NAMES = {  # names that drivers give, which look like each other
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA GH200 144G HBM3e": "gh200-144g",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100 80GB PCIe": "a100-80g-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-40g-pcie",
    "NVIDIA L40": "l40",
    "NVIDIA L4": "l4",
    "Tesla V100-SXM2-32GB": "v100-32g",
}


def test_each_name_of_a_driver_matches_one_kind() -> None:
    for name, kind in NAMES.items():
        patterns = [(known, pattern) for known, gpu in known_gpus().items() for pattern in gpu.device_names]
        assert {known for known, pattern in patterns if re.search(pattern, name)} == {kind}
        assert gpu_of_device(name, {}) == (kind, known_gpus()[kind])


def test_a_machine_has_its_kinds_memory_and_usual_node() -> None:
    h100s = machine("h100", {})
    assert (h100s.per_node, h100s.device, h100s.precision) == (8, "cuda", "bfloat16")
    assert (h100s.memory, h100s.peak_flops("bfloat16")) == (pytest.approx(79.2 * GIB, abs=1), 989e12)
    assert machine("h100", {}, 4).per_node == 4
    seen = this_gpu("NVIDIA H100 80GB HBM3", 60 * GIB, {}, 8)
    assert (seen.name, seen.memory, seen.peak_flops("float32")) == ("h100", 60 * GIB, 67e12)
