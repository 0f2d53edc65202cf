"""The base class of all configuration sections, and their common number types."""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

LARGEST = 2**63 - 1  # the largest integer of JSON parsers and of counters in libraries

Share = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]  # the range of torch's and numpy's generators

# Far above every model ever trained: a typo is reported by its key, not by running out of memory.
Size = Annotated[int, Field(gt=0, le=2**31 - 1)]


def _no_boolean(text: str) -> str:
    if text.lower() in ("true", "false", "yes", "no", "on", "off"):
        raise ValueError(f"needs a name, not {text}; leave the key out for none")
    return text


Name = Annotated[str, AfterValidator(_no_boolean)]
"""What another program gives a name to. YAML's booleans, which are read as text, are no names."""


class Section(BaseModel):
    """Base of all sections: unknown keys, NaN and infinity are errors; fields have descriptions.

    A key without a value (`language:`) is an empty text where the key takes text but not null.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _nothing_is_empty_text(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        return "" if value is None and str in kinds and NoneType not in kinds else value


@dataclass(frozen=True)
class Need:
    """A key's condition for having an effect, in the `Annotated` type of its field."""

    needs: str
    """What the key needs, in words."""
    met: Callable[[Any], object]
    """Whether the key's section has it."""
    refused: bool = False
    """Whether a set key without it is an error; otherwise the plan names the key."""


class CheckedSection(Section):
    """A section that refuses keys without effect, its own and those of the sections in it."""

    @property
    def without_effect(self) -> list[str]:
        """The keys that were set and have no effect: `train.keep_every 9 (needs train.keep_last)`.

        Raises ValueError for the first that is refused.
        """
        return list(_without_effect(self))

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        _ = self.without_effect
        return self


def _without_effect(section: Section, name: str = "") -> Iterator[str]:
    for key, field in type(section).model_fields.items():
        value, full = getattr(section, key), f"{name}{key}"
        if isinstance(value, Section):
            yield from _without_effect(value, f"{full}.")
        for need in (each for each in field.metadata if isinstance(each, Need)):
            if value == field.default or need.met(section):
                continue
            text = f"{full} {str(value).lower() if isinstance(value, bool) else value}"
            if need.refused:
                raise ValueError(f"{text} needs {need.needs}; set that, or leave {full} out")
            yield f"{text} (needs {need.needs})"


def names(value: Any, name: str = "") -> Iterator[str]:
    """The full name of each key in plain settings: `clean`, `clean.language`, `sources.0.path`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{name}{key}"
            yield from names(inner, f"{name}{key}.")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from names(inner, f"{name}{index}.")


def changes(
    then: Mapping[str, Any], now: Mapping[str, Any], given: Container[str] | None = None, name: str = ""
) -> list[str]:
    """The keys of plain settings that differ, below `name`: `train.lr 0.01 -> 0.02`.

    A key that only one side has is from another version of the toolkit. With `given`, the `names`
    of keys that differ from their default on either side, it counts only if it is one of them:
    without the key, a version does what the default does.
    """
    lines = []
    for key in {**then, **now}:
        old, new, full = then.get(key), now.get(key), f"{name}{key}"
        if (
            isinstance(old, list)
            and isinstance(new, list)
            and len(old) == len(new)
            and isinstance((old or [0])[0], dict)
        ):
            old, new = dict(enumerate(old)), dict(enumerate(new))  # of sections
        if isinstance(old, dict) and isinstance(new, dict):
            lines += changes(old, new, given, f"{full}.")
        elif old != new and (given is None or full in given or (key in then and key in now)):
            lines.append(f"{full} {old} -> {new}")
    return lines
