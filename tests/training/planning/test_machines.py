"""The kinds of GPUs: what is known of each, how a device is recognised, and the machines that are
planned for.
"""

import re
from pathlib import Path

import pytest

from training.planning import machines
from training.planning.machines import GIB, available_memory, gpu_of_device, known_gpus, machine, this_gpu

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
    unknown = this_gpu("NVIDIA H100 MIG 3g.40gb", 39 * GIB, {}, 2)
    assert (unknown.timed, unknown.memory, unknown.per_node) == (False, 39 * GIB, 2)


def test_memory_is_what_control_groups_and_slurm_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "memory/c").mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("5:cpu:/x\n4:memory:/c/gone\n0::/a/b\n")
    (tmp_path / "a/b/memory.max").write_text("max\n")
    (tmp_path / "a/memory.max").write_text("7000\n")
    (tmp_path / "memory/c/memory.limit_in_bytes").write_text("5000\n")
    assert sorted(machines._cgroup_limits(tmp_path, own)) == [5000, 7000]
    monkeypatch.setattr(machines, "_cgroup_limits", lambda: [2**62])
    whole = available_memory({})
    job = {"SLURM_JOB_ID": "1"}
    assert whole > GIB and available_memory({"SLURM_MEM_PER_NODE": "5"}) == whole, "no job"
    assert available_memory({**job, "SLURM_MEM_PER_NODE": "5"}) == 5 << 20
    assert available_memory({**job, "SLURM_MEM_PER_NODE": "0"}) == whole
    assert available_memory({**job, "SLURM_MEM_PER_CPU": "5", "SLURM_CPUS_ON_NODE": "4"}) == 20 << 20
