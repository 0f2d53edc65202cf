"""What the device itself can do: copies and matrix products, the ceilings of everything else.

Every row is on random data: products of zeros run faster. A copy counts the bytes that it reads and those it writes.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.gpu.clock import median_seconds
from benchmarks.gpu.items import Context, Item, Row

if TYPE_CHECKING:
    import torch

TITLE = "The machine: copies and matrix products"

# (M, N, K) of M x K times K x N: a large one, then 345M's at micro-batch 16: qkv, out, up, down, head, and the
# gradients of the weights of up and of the head
_PRODUCTS = {
    "large": (8192, 8192, 8192),
    "qkv, K = 1,024": (16384, 3072, 1024),
    "out, K = 1,024": (16384, 1024, 1024),
    "up, K = 1,024": (16384, 4096, 1024),
    "down, K = 4,096": (16384, 1024, 4096),
    "head, K = 1,024": (16384, 50304, 1024),
    "gradient of up's weight": (4096, 1024, 16384),
    "gradient of the head's weight": (50304, 1024, 16384),
}


def items(_toy: bool) -> list[Item]:
    """One item per kind of row."""
    return [Item("machine", "copy", 5), Item("machine", "products", 15)]


def run(item: Item, context: Context) -> Iterator[Row]:
    """Rows with the columns device, shape, ms, TFLOP/s, TB/s."""
    import torch

    device = torch.device("cuda" if context.gpu else "cpu")
    if item.name == "copy":
        source = torch.randn(2**16 if context.toy else 2**30, device=device)  # 4.3 GB: many times any cache
        target = torch.empty_like(source)
        taken = median_seconds(lambda: target.copy_(source), device)
        yield _row("copy", f"{source.nbytes / 1e9:.3g} GB", taken, copied=2 * source.nbytes)
        return
    for name, shape in _PRODUCTS.items():
        yield _product(name, tuple(size // 128 for size in shape) if context.toy else shape, torch.bfloat16, device)
    yield _product("large", (64, 64, 64) if context.toy else (8192, 8192, 8192), torch.float32, device)


def _product(name: str, shape: tuple[int, ...], dtype: "torch.dtype", device: "torch.device") -> Row:
    import torch

    rows, columns, inner = shape
    left = torch.randn(rows, inner, device=device, dtype=dtype)
    right = torch.randn(columns, inner, device=device, dtype=dtype)
    product = torch.empty(rows, columns, device=device, dtype=dtype)
    taken = median_seconds(lambda: torch.mm(left, right.t(), out=product), device)
    kind = f"{str(dtype).removeprefix('torch.')} product, {name}"
    return _row(kind, f"{rows} x {columns} x {inner}", taken, work=2 * rows * columns * inner)


def _row(kind: str, shape: str, taken: float, work: int = 0, copied: int = 0) -> Row:
    return {
        "device": kind,
        "shape": shape,
        "ms": taken * 1000,
        "TFLOP/s": work / taken / 1e12 if work else None,
        "TB/s": copied / taken / 1e12 if copied else None,
    }


def ceilings(rows: list[Row]) -> tuple[float | None, float | None]:
    """Bytes per second of a copy, and FLOP/s of the fastest bfloat16 product; None for what was not measured."""
    copies = [row["TB/s"] * 1e12 for row in rows if row["TB/s"] is not None]
    products = [row["TFLOP/s"] * 1e12 for row in rows if str(row["device"]).startswith("bfloat16")]
    return max(copies, default=None), max(products, default=None)
