"""The kinds of GPUs: what is known of each, how a device is recognised, and the machines that are planned for."""

import re

import pytest

from common.errors import ConfigError
from common.settings import GpuSettings
from training.planning.machines import GIB, find_gpu, gpu_of_device, known_gpus, machine

NAMES = {  # by names that drivers give: one per kind, and the longer ones that look like another kind
    "NVIDIA GB200": "gb200",
    "NVIDIA B200": "b200",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA GH200 144G HBM3e": "gh200-144g",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "NVIDIA A100 80GB PCIe": "a100-80g-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-40g-pcie",
    "NVIDIA A40": "a40",
    "NVIDIA A30": "a30",
    "NVIDIA A10": "a10",
    "NVIDIA L40S": "l40s",
    "NVIDIA L40": "l40",
    "NVIDIA L4": "l4",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "Tesla V100-SXM2-32GB": "v100-32g",
    "Tesla V100-SXM2-16GB": "v100-16g",
    "Tesla V100-PCIE-32GB": "v100-32g-pcie",
    "Tesla V100-PCIE-16GB": "v100-16g-pcie",
    "Tesla T4": "t4",
}
OURS = GpuSettings(
    memory_gib=30, float32_tflops=20, memory_gb_per_s=1000, node_gb_per_s=32, network_gb_per_s=3, device_names=["Ours$"]
)


def test_each_name_of_a_driver_matches_one_kind_and_every_kind_has_one() -> None:
    assert set(known_gpus()) == set(NAMES.values())
    for name, kind in NAMES.items():
        patterns = [(known, pattern) for known, gpu in known_gpus().items() for pattern in gpu.device_names]
        assert {known for known, pattern in patterns if re.search(pattern, name)} == {kind}
        assert gpu_of_device(name, {}) == (kind, known_gpus()[kind])


def test_the_configuration_adds_kinds_and_replaces_them() -> None:
    own = {"ours": OURS, "h100": OURS.model_copy(update={"device_names": [r"\bH100 80GB HBM3$"]})}
    assert find_gpu("h100", own).memory_gib == 30
    assert gpu_of_device("Ours", own) == ("ours", OURS)
    assert gpu_of_device("NVIDIA H100 80GB HBM3", own) == ("h100", own["h100"])
    assert gpu_of_device("NVIDIA H100 80GB HBM3", {"h100": OURS}) is None  # it matches by its new name only
    with pytest.raises(ConfigError, match=r"'h10'.*h100"):
        find_gpu("h10", {})


def test_a_machine_has_its_kinds_memory_and_usual_node_and_options_replace_them() -> None:
    h100s = machine("h100", {})
    assert (h100s.per_node, h100s.device, h100s.precision) == (8, "cuda", "bfloat16")
    assert (h100s.memory, h100s.peak_flops("bfloat16")) == (pytest.approx(79.2 * GIB, abs=1), 989e12)
    given = machine("h100", {}, 8, memory_bytes=60 * GIB, peak_tflops=800)
    assert (given.memory, given.peak_flops("bfloat16"), given.peak_flops("float32")) == (60 * GIB, 800e12, 67e12)
