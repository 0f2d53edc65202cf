"""What all sections of the configuration share."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

LARGEST = 2**63 - 1  # what JSON and every library's counters hold

Share = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]  # what torch's and numpy's generators take

# Far above every model that was ever trained: a slip of the hand is told by its key, not by the memory it takes.
Size = Annotated[int, Field(gt=0, le=2**31 - 1)]


class Section(BaseModel):
    """A part of the configuration: unknown keys, NaN and infinity are errors, every field carries its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _whole_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Values of a YAML file arrive as text; `3.2e5` is a whole number, too."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if kind is int and isinstance(value, str) and "e" in value.lower():
            try:
                number = float(value)
            except ValueError:
                return value
            return int(number) if number.is_integer() else value
        return value
