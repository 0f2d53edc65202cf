"""Threads and GPUs of a process: one rule for threads, and a clear error where a GPU is missing."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from common.errors import JobError
from tests.conftest import ROOT
from training.launch.device import choose_device, claim_gpu, threads_of
from training.launch.rank import Launch

ALONE = Launch("single", 0, 1, 0, 1, 1, "single")
SLURM = Launch("slurm", 1, 4, 1, 2, 2, "slurm-1.0-0")


def test_the_settings_decide_the_threads_and_otherwise_slurm_or_an_equal_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.launch.device.available_cpus", lambda: 12)
    inherited = {"OMP_NUM_THREADS": "7"}
    assert [threads_of(job, 3, inherited) for job in (ALONE, SLURM)] == [3, 3]
    assert threads_of(ALONE, 0, inherited) == 12
    assert threads_of(Launch("torchrun", 0, 8, 0, 8, 1, "torchrun"), 0, inherited) == 1
    assert threads_of(SLURM, 0, {"SLURM_CPUS_PER_TASK": "4", "SLURM_CPUS_ON_NODE": "64"}) == 4
    assert threads_of(SLURM, 0, {"SLURM_CPUS_ON_NODE": "16"}) == 8
    assert threads_of(SLURM, 0, {"SLURM_CPUS_PER_TASK": "64"}) == 12, "no more than Slurm bound the task to"


def test_an_inherited_number_of_threads_changes_nothing() -> None:
    code = """
import json, os
from pathlib import Path
from common.settings import ClusterSettings
from training.launch.rank import read_launch
from training.launch.process_group import started
with started(read_launch(), Path("."), ClusterSettings(cpus_per_task=3)):
    import torch
    print(json.dumps([torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]]))
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert json.loads(found.splitlines()[-1]) == [3, "3", "3"]


def test_fewer_gpus_than_asked_for_is_an_error_that_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    with pytest.raises(JobError, match=r"node7.*gpus_per_node is 8"):
        choose_device(SLURM, 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert choose_device(SLURM).index == 1
    with pytest.raises(JobError, match=r"4 .* 2"):  # processes, GPUs
        choose_device(Launch("torchrun", 2, 4, 2, 4, 1, "torchrun"))


def test_two_processes_on_one_gpu_is_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="GPU-1"))
    store, device = HashStore(), torch.device("cuda", 0)
    claim_gpu(SLURM, device, store)
    with pytest.raises(JobError, match=r"1 and 3 .*GPU-1"):
        claim_gpu(Launch("slurm", 3, 4, 1, 2, 2, "slurm-1.0-0"), device, store)
    monkeypatch.setenv("SLURMD_NODENAME", "another")
    claim_gpu(Launch("slurm", 2, 4, 0, 2, 2, "slurm-1.0-0"), device, store)


def test_a_driver_that_refuses_expandable_segments_is_used_without_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["expandable_segments:True"]

    def empty(*_: object, **__: object) -> None:
        if settings[-1].endswith("True"):
            raise RuntimeError("CUDA driver error: operation not supported\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "a person's")
    with pytest.raises(RuntimeError, match="not supported"):
        choose_device(ALONE)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings[0])
    assert choose_device(ALONE).type == "cuda"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == settings[-1] == "expandable_segments:False"
    assert "refuses expandable segments, memory is allocated without: CUDA driver error" in capsys.readouterr().err
