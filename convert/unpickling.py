"""The unpickler for files that anybody may have made: it imports no class and constructs only plain data.

A pickle names classes and functions, and an ordinary unpickler imports and calls them. Here each name becomes a new
empty class that keeps what the pickle gives it (`Placeholder`).
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import IO, Any

import torch

_SAFE: dict[str, Any] = {  # types that cannot be changed, and whose constructors only hold values
    "torch.Size": torch.Size,
    "collections.OrderedDict": OrderedDict,
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class Placeholder:
    """An object of a class that is not imported."""

    name = ""
    """The class's full name."""
    args: tuple[Any, ...] = ()
    """The arguments of the constructor."""
    state: Any = None
    """What the pickle sets: a dict of attributes, which the placeholder has too, or anything else."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        if isinstance(self.state, dict) and name in self.state:
            return self.state[name]
        raise AttributeError(name)


class ForeignClassError(Exception):
    """A pickle names a class or function that is not in the list."""


def load_plain(
    file: IO[bytes],
    names: tuple[str, ...] | None,
    known: Mapping[str, Callable[..., Any]] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The content of the next pickle in a file, which may name what begins with one of `names` (None: anything),
    torch.Size, torch's dtypes and OrderedDict.

    `known` are functions that are called for the names in it; they must not be shared between calls, because a pickle
    can set their attributes. `persistent` answers the pickle's persistent ids. Raises ForeignClassError, or any other
    exception for a damaged pickle.
    """
    unpickler = _Unpickler(file, encoding="utf-8")
    unpickler.names = names
    unpickler.made = {**_SAFE, **(known or {})}
    if persistent:
        unpickler.persistent_load = persistent  # type: ignore[method-assign]
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    names: tuple[str, ...] | None
    made: dict[str, Any]  # of this pickle alone, which can set attributes of them

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self.made:
            if self.names is not None and not full.startswith(self.names):
                raise ForeignClassError(full)
            self.made[full] = type("Placeholder", (Placeholder,), {"name": full})
        return self.made[full]
