"""Manifests that other versions of this toolkit wrote.

FORMAT is raised by a change that older versions must not read past: they stop then, with a line that says so. All else
is read on: keys that this version does not know are left out, renamed ones are mapped, and one that a manifest does not
have yet takes the value that means what was done before there was such a key. Values are not judged again by today's
rules: a run that was trained under them stands.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from common.errors import CheckpointError
from common.settings import Section

FORMAT = 1

RENAMED: dict[tuple[str, str], str] = {}
"""(section, key in older manifests): its key of today."""
BEFORE: dict[tuple[str, str], Any] = {}
"""(section, key): what was done before there was this key, where that is not its default of today."""

_Kind = TypeVar("_Kind", bound=Section)


class OtherVersion(CheckpointError):
    """A manifest that this version of the toolkit must not read."""


def read_section(kind: type[_Kind], section: str, raw: Any) -> _Kind:
    """A section of a manifest as settings.

    Raises OtherVersion for a `model` with a key that is in use there and unknown here: that is another architecture.
    ValueError when it is no section at all, or lacks what has no default.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{section}: not a section")
    named = {RENAMED.get((section, key), key): value for key, value in raw.items()}
    unknown = [key for key, value in named.items() if key not in kind.model_fields and value]
    if section == "model" and unknown:
        raise OtherVersion(f"model.{unknown[0]}: not known to this version of the toolkit; use the one that wrote it")
    fields = {key: field for key, field in kind.model_fields.items() if key not in named}
    for key, field in fields.items():
        if (section, key) in BEFORE:
            named[key] = BEFORE[section, key]
        elif field.is_required():
            raise ValueError(f"{section}.{key} is missing")
    known = {key: value for key, value in named.items() if key in kind.model_fields}
    return kind.model_validate(known) if section == "model" else kind.model_construct(**known)
