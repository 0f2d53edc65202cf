"""The CUDA kernels: compile them, and see which of them work here and are used.

    python -m training.kernels build
    python -m training.kernels check

A training compiles them itself when it needs them. `build` does so beforehand: for the GPUs of this machine, on one
without a GPU for sm_75, sm_80 and sm_90, or for --architectures. `check` runs every kernel on the GPU beside PyTorch;
`check --measure` also times it beside PyTorch and torch.compile, at GPT-2 345M's shapes. Without a GPU every op runs in
PyTorch.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence

from common import cli
from common.console import say
from common.errors import KernelError
from common.tables import text_table
from training.kernels.build import build, cache_folder, find_library, log_of, nvcc
from training.kernels.resources import HEADER, read_log


def build_library(architectures: Sequence[int], listed: bool) -> int:
    """Compile for compute capabilities (90: sm_90), by default those of the visible GPUs; returns the exit code.

    `listed`: print what each kernel needs, too.
    """
    import torch

    if not architectures and torch.cuda.is_available():
        found = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        architectures = sorted({10 * major + minor for major, minor in found})
    compiler = nvcc(architectures)
    begun = time.monotonic()
    existed = compiler.library(cache_folder()).exists()
    path = build(compiler)
    took = "was there already" if existed else f"compiled in {time.monotonic() - begun:.0f} s"
    say(f"{path}: {took}, for {compiler.target.replace('.', ', ')}")
    if listed:
        say(text_table([HEADER, *read_log(log_of(path))], "lrrr"))
    return 0


def check(measured: bool) -> int:
    """Print a row per kernel; returns the exit code: 1 if a kernel fails, or gives another result than PyTorch."""
    import torch

    from training.kernels import library
    from training.kernels.choice import KERNELS, choose

    missing = library.prepare(report=False)
    has_gpu = torch.cuda.is_available()
    built = "yes" if find_library([library.capability()] if has_gpu else []) else "no"
    tested = dict.fromkeys(KERNELS, "-") if missing else _test()
    choice = choose(None, "auto", missing)
    why = choice["reasons"] if missing or not measured else _measure()
    say(f"device: {torch.cuda.get_device_name() if has_gpu else 'no GPU: every op runs in PyTorch'}")
    rows = [("kernel", "built", "tested", "selected", "why")]
    for name in KERNELS:
        rows.append((name, built, tested[name], "yes" if name in choice["kernels"] else "no", why[name]))
    say(text_table(rows))
    return int(any(text not in ("-", "yes") for text in tested.values()))


def _test() -> dict[str, str]:
    """For each kernel `yes`, or how its result differs from PyTorch's."""
    import torch

    from training.kernels.cases import Shapes, cases, verify

    device = torch.device("cuda", torch.cuda.current_device())
    results: dict[str, str] = {}
    for dtype in ("float32", "float16", "bfloat16"):
        small = Shapes(2, 96, 2, 128, 2, 1000, 1024, 0.1, dtype)
        for case in cases(small, device):
            try:
                fault = verify(case)
            except KernelError as error:
                fault = str(error)
            if results.get(case.kernel, "yes") == "yes":
                results[case.kernel] = f"no, {dtype}: {fault}" if fault else "yes"
    return results


def _measure() -> dict[str, str]:
    """The times of each kernel and its peers."""
    import torch

    from training.kernels.cases import Shapes
    from training.kernels.choice import choose, measure

    found = choose(measure(Shapes(), torch.device("cuda", torch.cuda.current_device())), "auto")
    return {
        name: f"{text}; {'fastest' if name in found['kernels'] else 'not the fastest'}"
        for name, text in found["reasons"].items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.kernels", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="compile the kernels with nvcc")
    command.add_argument(
        "--architectures",
        type=cli.positive_int,
        nargs="+",
        default=(),
        metavar="N",
        help="such as 80 90, for sm_80 and sm_90",
    )
    command.add_argument("--resources", action="store_true", help="list each kernel's registers, shared memory, spills")
    command = commands.add_parser("check", help="list the kernels: compiled, tested on this GPU, used")
    command.add_argument("--measure", action="store_true", help="time them, too")
    arguments: Namespace = parser.parse_args(argv)
    if arguments.command == "build":
        return build_library(arguments.architectures, arguments.resources)
    return check(arguments.measure)


if __name__ == "__main__":
    sys.exit(cli.run(main))
