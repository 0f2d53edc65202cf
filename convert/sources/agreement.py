"""Do float32 weights belong to the 16-bit weights that were saved with them? One row of each tensor tells.

Optimizer files do not say which iteration they are of, and DeepSpeed itself mixes up weights: under
round_robin_gradients its param_slice_mappings, and so its universal checkpoints, are in another order than the data.
"""

from collections.abc import Mapping

import torch

from common.errors import CheckpointError
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
