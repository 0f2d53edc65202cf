"""How near two results of the same arithmetic are: the one place for tolerances of sums.

Vector widths, threads, libraries, layouts and caches add the same terms in another order. One
addition rounds by up to eps/2 of what it holds, and independent errors of n additions grow like
sqrt(n): Higham, Accuracy and Stability of Numerical Algorithms, section 2.8. A result that cancels
is as wrong as its terms, so errors are compared with the largest value of a tensor and never with
each value, and never with a number that one processor happened to meet.
"""

import math
from typing import Any

import torch
from torch import Tensor

SPREAD = 2
"""The largest error of a tensor, in eps: seven standard deviations of one rounding, which is eps /
sqrt(12).
"""


def tolerance(terms: int) -> float:
    """The relative difference of two float32 sums of so many terms."""
    return SPREAD * torch.finfo(torch.float32).eps * math.sqrt(terms)


def logit_terms(model: Any) -> int:
    """How many terms are added one after the other between a token and a logit of a GPT-2 of these
    settings.

    Per layer the sums of two norms, of qkv, of the scores and their values (no longer than n_embd
    here), of the projection and of the MLP (1 + 4 times n_embd); then the head's. A loss adds few;
    a gradient goes back: twice more.
    """
    layers, width = model.n_layer, model.n_embd
    return int((10 * layers + 1) * width)


def assert_close(found: Tensor | None, expected: Tensor | None, *, terms: int, scale: float = 0.0) -> None:
    """Each value of `found` is `expected`, computed in float32 by sums of so many terms and rounded
    to its dtype once.

    Any shape, type and device; NaN is never close. `scale` is the size of the terms, where all
    results may cancel.
    """
    assert found is not None and expected is not None and found.shape == expected.shape
    exact, rounding = expected.detach().double().cpu(), torch.finfo(found.dtype).eps
    difference = (found.detach().double().cpu() - exact).abs()
    largest = max(scale, float(exact.abs().max())) if exact.numel() else scale
    limit = tolerance(terms) * largest + rounding * exact.abs()
    worst = float((difference / limit).max()) if difference.any() else 0.0
    assert worst <= 1, f"the difference is {worst:.2f} times what float32 sums of {terms} terms explain"
