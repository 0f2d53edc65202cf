"""An unpickler for files that anybody may have made: it looks classes up in a list and constructs only plain data.

A pickle names classes and functions, and an ordinary unpickler imports and calls them. Here each name of the list
becomes a new empty class that keeps what the pickle gives it (`Placeholder`); any other name is an error.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection
from io import BytesIO
from typing import Any

import torch

_SAFE: dict[tuple[str, str], Any] = {  # types that cannot be changed, and whose constructors only hold values
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class Placeholder:
    """An object of a class that is not imported."""

    name = ""
    """The class's full name."""
    args: tuple[Any, ...] = ()
    """The arguments of the constructor; attributes of the object are attributes of the placeholder."""
    state: Any = None
    """What the pickle sets instead of attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class ForeignClassError(Exception):
    """A pickle names a class or function that is not in the list."""


def load_plain(data: bytes, names: Collection[str], persistent: Callable[[Any], Any] | None = None) -> Any:
    """The content of a pickle that may name `names`, torch.Size, torch's dtypes and OrderedDict.

    `persistent` answers the pickle's persistent ids. Raises ForeignClassError, or any other exception for a damaged
    pickle.
    """
    return _Unpickler(data, names, persistent).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, names: Collection[str], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(BytesIO(data))
        self._names, self._persistent = names, persistent
        self._made: dict[str, type[Placeholder]] = {}  # of this pickle alone, which can set attributes of them

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._made:
            return self._made[full]
        if (module, name) in _SAFE:
            return _SAFE[module, name]
        if full not in self._names:
            raise ForeignClassError(full)
        return self._made.setdefault(full, type("Placeholder", (Placeholder,), {"name": full}))

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("a persistent id")
        return self._persistent(pid)
