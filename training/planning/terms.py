"""A prediction is a sum of terms, each with its formula and source, so that it can be explained."""

from collections.abc import Iterable
from typing import NamedTuple


class Term(NamedTuple):
    """One summand of a prediction."""

    part: str
    """The part of the memory or of the time that it belongs to."""
    value: float
    """Bytes, or seconds."""
    name: str
    """What it is, in a few words."""
    formula: str
    """In the symbols of `symbols`."""
    source: str = ""
    """Paper or page; empty: our own, checked by a test."""


def by_part(terms: Iterable[Term]) -> dict[str, float]:
    """The sum of each part, in the order of first appearance."""
    parts: dict[str, float] = {}
    for term in terms:
        parts[term.part] = parts.get(term.part, 0.0) + term.value
    return parts
