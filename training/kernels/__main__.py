"""Compile the CUDA kernels, and check which of them work on this machine.

    python -m training.kernels build
    python -m training.kernels check

A training compiles them itself when it needs them. `build` does so beforehand: for the GPU of this
machine, on one without a GPU for all that nvcc knows. `check` runs every kernel on the GPU beside
PyTorch. Without a GPU every op runs in PyTorch. `python -m benchmarks.gpu` times them.
"""

import sys
import time
from collections.abc import Sequence

from common import cli
from common.console import say, text_table
from common.errors import KernelError
from training.kernels.build import build, nvcc


def build_library() -> int:
    """Compile for the GPU of this machine, without one for all; returns the exit code."""
    import torch

    from training.kernels.library import capability

    compiler = nvcc(capability() if torch.cuda.is_available() else 0)
    begun = time.monotonic()
    existed = compiler.library.exists()
    path = build(compiler)
    took = "was there already" if existed else f"compiled in {time.monotonic() - begun:.0f} s"
    say(f"{path}: {took}, for {compiler.target}")
    return 0


def check() -> int:
    """Print a row per kernel; returns the exit code: 1 if one fails or differs from PyTorch."""
    import torch

    from training.kernels import library

    missing = library.prepare(report=False)
    tested = dict.fromkeys(library.KERNELS, f"not tested: {missing}") if missing else _test()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: every op runs in PyTorch"
    say(f"device: {device}\n{text_table([('kernel', 'as PyTorch'), *tested.items()])}")
    return int(not missing and set(tested.values()) != {"yes"})


def _test() -> dict[str, str]:
    """For each kernel `yes`, or how its result differs from PyTorch's."""
    import torch

    from training.kernels import library
    from training.kernels.cases import Shapes, cases, verify

    device = torch.device("cuda", torch.cuda.current_device())
    results = dict.fromkeys(library.KERNELS, "yes")
    for dtype in ("bfloat16", "float16", "float32"):  # the last fault is kept
        for case in cases(Shapes(2, 96, 2, 128, 1024, 0.1, dtype), device):
            try:
                verify(case)
            except KernelError as error:
                results[case.kernel] = f"no, {dtype}: {error}"
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.kernels", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="compile the kernels with nvcc")
    commands.add_parser("check", help="compare every kernel with PyTorch on this GPU")
    return build_library() if parser.parse_args(argv).command == "build" else check()


if __name__ == "__main__":
    sys.exit(cli.run(main))
