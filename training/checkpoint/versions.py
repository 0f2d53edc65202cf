"""Read the settings in manifests that other versions of this toolkit wrote.

A change that older versions must not ignore raises FORMAT: they stop then, and say so. Everything else stays readable:
unknown keys are dropped, renamed keys are mapped, and a missing key gets the value that describes the behaviour before
the key existed. Values are not validated again: what an older version accepted stays valid.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from common.errors import CheckpointVersionError
from common.settings import Section

FORMAT = 1

RENAMED: dict[tuple[str, str], str] = {}
"""(section, key in older manifests): the key's present name."""
BEFORE: dict[tuple[str, str], Any] = {}
"""(section, key): the behaviour before this key existed, if that is not its present default."""

_Kind = TypeVar("_Kind", bound=Section)


def read_section(kind: type[_Kind], section: str, raw: Any) -> _Kind:
    """A section of a manifest as settings.

    Raises CheckpointVersionError for a `model` section in which an unknown key is in use, because that is another
    architecture. Raises ValueError if `raw` is not a section, or lacks a key that has no default.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{section}: not a section")
    named = {RENAMED.get((section, key), key): value for key, value in raw.items()}
    unknown = [key for key, value in named.items() if key not in kind.model_fields and value]
    if section == "model" and unknown:
        raise CheckpointVersionError(
            f"model.{unknown[0]}: not known to this version of the toolkit; use the one that wrote it"
        )
    fields = {key: field for key, field in kind.model_fields.items() if key not in named}
    for key, field in fields.items():
        if (section, key) in BEFORE:
            named[key] = BEFORE[section, key]
        elif field.is_required():
            raise ValueError(f"{section}.{key} is missing")
    known = {key: value for key, value in named.items() if key in kind.model_fields}
    return kind.model_validate(known) if section == "model" else kind.model_construct(**known)
