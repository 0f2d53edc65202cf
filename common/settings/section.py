"""The base class of all configuration sections, and their common number types."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 2**63 - 1  # the largest integer of JSON parsers and of counters in libraries

Share = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]  # the range of torch's and numpy's generators

# Far above every model ever trained, so that a typo is reported by its key and not by running out of memory.
Size = Annotated[int, Field(gt=0, le=2**31 - 1)]


class Section(BaseModel):
    """Base of all sections: unknown keys, NaN and infinity are errors; every field has a description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


def changes(then: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> list[str]:
    """The keys of plain settings that differ, below `name`: `train.lr 0.01 -> 0.02`."""
    found = []
    for key in {**then, **now}:
        old, new = then.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += changes(old, new, f"{name}{key}.")
        elif old != new:
            found.append(f"{name}{key} {old} -> {new}")
    return found
