"""The peak of a device, and with it the share of it that is used (MFU).

tflops = flops_per_token(model) * tokens_per_second / world_size / 1e12    # per device
mfu = tflops / peak_tflops(device, "bfloat16")                             # None if the peak is 0: not known
"""

import re

import torch

from training.precision import precision_type

# Dense peaks in TFLOP/s: float16 and bfloat16 on tensor cores with float32 accumulation, TF32, plain float32. From
# NVIDIA's data sheets and architecture papers, whose larger figures are for sparse matrices. The first pattern that
# matches a device's name counts; without a match (laptop chips, MIG slices) the peak is not known.
_PEAKS = (
    (r"\bGB200$", 2500, 1250, 80),
    (r"\bB200$", 2250, 1125, 75),
    (r"\bH200 NVL$", 835, 417, 60),
    (r"\bG?H200\b", 989, 494, 67),
    (r"\bH100 NVL$", 835, 417, 60),
    (r"\bH100 PCIe$", 756, 378, 51),
    (r"\bH100 80GB HBM3$", 989, 494, 67),
    (r"\bA100\b", 312, 156, 19.5),
    (r"\bA40$", 149.7, 74.8, 37.4),
    (r"\bA30$", 165, 82, 10.3),
    (r"\bA10$", 125, 62.5, 31.2),
    (r"\bL40S$", 362, 183, 91.6),
    (r"\bL40$", 181, 90.5, 90.5),
    (r"\bL4$", 121, 60, 30.3),
    (r"\bRTX 6000 Ada Generation$", 364.2, 182.1, 91.1),
    (r"\bRTX A6000$", 154.8, 77.4, 38.7),
    (r"\bRTX 4090$", 165.2, 82.6, 82.6),
    (r"\bRTX 3090$", 71, 35.6, 35.6),
    (r"\bV100-PCIE-", 112, 14, 14),  # no TF32, as on the T4
    (r"\bV100-SXM2-", 125, 15.7, 15.7),
    (r"\bT4$", 65, 8.1, 8.1),
)


def peak_tflops(device: torch.device, precision: str, override: float = 0) -> float:
    """The dense peak of one device in TFLOP/s at train.precision, or `override` if it is not 0; 0: not known."""
    if override or device.type != "cuda":
        return override
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_of(torch.cuda.get_device_name(device), precision_type(precision, device), tf32)


def peak_of(name: str, precision: torch.dtype, tf32: bool = False) -> float:
    """The dense peak of a device of this name in TFLOP/s, with TF32 in place of float32 if `tf32`; 0: not known."""
    if " MIG " not in name:
        for pattern, half, tensor_float, single in _PEAKS:
            if re.search(pattern, name):
                return half if precision != torch.float32 else tensor_float if tf32 else single
    return 0
