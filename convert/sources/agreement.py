"""Do files belong together: float32 weights and the 16-bit weights that were saved with them, and those of all ranks?

One row of each tensor tells whether weights are the rounded ones.

Optimizer files do not say which iteration they are of, and DeepSpeed itself mixes up weights: under
round_robin_gradients its param_slice_mappings, and so its universal checkpoints, are in another order than the data.
"""

from collections.abc import Iterable, Mapping

import torch

from common.errors import CheckpointError
from convert.files.stored import Stored, StoredPieces, row_bands, same_values
from convert.sources.source import Sharded

_ROUNDING = 2.0**-6  # bfloat16 has 8 significant bits; one more for stochastic rounding, one to be sure
_SMALLEST = 1e-6  # float16 has few bits, or none, for weights below 6e-5


def check_agreement(low: Mapping[str, Sharded], high: Mapping[str, Sharded], cure: str) -> None:
    """Raises CheckpointError if a tensor of `high` does not round to that of `low`; each in its first block."""
    for name in low.keys() & high.keys():
        first, second = low[name].blocks[0].tensor, high[name].blocks[0].tensor
        last = min(first.shape[0], second.shape[0])
        rows = [tensor.rows(last - 1, last).read().flatten().float() for tensor in (first, second)]
        width = min(map(len, rows))  # a tensor rank's part of a row, if one side is merged
        rounded, exact = (row[:width] for row in rows)
        if not rounded.any():
            continue  # a placeholder
        if not torch.allclose(rounded, exact, rtol=_ROUNDING, atol=_SMALLEST, equal_nan=True):
            difference = float((rounded - exact).abs().max())
            raise CheckpointError(
                f"row {last - 1} of tensor {name!r} differs by {difference:.1e} from the 16-bit weights of the model "
                f"files, more than rounding explains; {cure}"
            )


def check_distinct(parts: Iterable[Stored]) -> None:
    """Raises CheckpointError if two parts of the weights are equal and not constant: a rank's file was copied."""
    seen: dict[tuple[float, ...], Stored] = {}
    for part in parts:
        start = part.rows(0, 1 if len(part.shape) > 1 else min(part.shape[0], 4096)).read()
        other = seen.setdefault(tuple(start.flatten().tolist()), part)
        if other is not part and same_values(other, part) and any(band.min() != band.max() for band in row_bands(part)):
            raise CheckpointError(
                f"the weights in {_file(part)} are those in {_file(other)}: one file was copied over another rank's; "
                "copy each from the run again"
            )


def _file(part: Stored) -> str:
    first = part.pieces[0] if isinstance(part, StoredPieces) else part
    return str(getattr(first, "path", "memory"))
