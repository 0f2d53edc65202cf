"""Read .pt files that anybody may have made: nothing in them is executed, and tensors stay on the disk.

PyTorch's `weights_only` unpickler calls a fixed list of constructors. Every other class that a file names becomes an
`Inert` one here, which keeps its arguments and state and does nothing. Under FakeTensorMode the unpickler reads no
tensor data; it records where each storage begins.
"""

import errno
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._weights_only_unpickler import get_globals_in_pkl

from common.errors import CheckpointError
from convert.files.checksums import check_archive, once
from convert.files.legacy_pt import load_meta
from convert.files.stored import LoadedTensor, StoredTensor


class Inert:
    """An object of a class that is not imported."""

    name = ""
    """The class's full name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs, self.state = args, kwargs, {}  # type: Any, Any, Any

    def __new__(cls, *_args: Any, **_kwargs: Any) -> "Inert":
        """Make one without calling __init__, as unpickling does."""
        made = super().__new__(cls)
        made.args, made.kwargs, made.state = (), {}, {}
        return made

    @property
    def member(self) -> str | None:
        """The name of an Enum's member, which Python 3.11 before 3.11.4 pickles as `getattr(CLASS, NAME)`."""
        return str(self.args[1]) if self.name == "builtins.getattr" and len(self.args) == 2 else None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)


def fields(value: Any) -> Mapping[str, Any]:
    """The attributes of an inert object (a Namespace of arguments) or the items of a dict; empty for anything else."""
    state = value.state if isinstance(value, Inert) else value
    return state if isinstance(state, Mapping) else {}


def load_inert(path: Path, data: bytes | None = None) -> Any:
    """The content of a .pt file, with tensors as `StoredTensor` (`LoadedTensor` if no data is stored for one).

    `data` is the content if it is only a part of the file `path`; its tensors are `LoadedTensor`s.
    Raises CheckpointError if the file is no .pt file, is damaged or cut off, or names a module that the unpickler
    blocks; damage in the tensors' data is found when the first of them is read.
    """
    with _without_safe_globals():
        return _load(path, data)


@contextmanager
def _without_safe_globals() -> Iterator[None]:
    """Forget the classes that libraries in this process declared safe, such as numpy's: they would be called."""
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(known)


def _load(path: Path, data: bytes | None) -> Any:
    try:
        with path.open("rb") if data is None else BytesIO(data) as file:
            is_zip = file.read(4) == b"PK\x03\x04"
            if is_zip:
                check_archive(path, file, tensors=data is not None)
            file.seek(0)
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if is_zip else _legacy_globals(file)
        with warnings.catch_warnings(), torch.serialization.safe_globals(_placeholders(names)):  # type: ignore[arg-type]
            warnings.simplefilter("ignore")
            if data is not None:
                content = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
            elif is_zip:
                with FakeTensorMode():
                    content = torch.load(path, map_location="cpu", weights_only=True)
            else:
                content = load_meta(path)
        return _convert(content, path, once(_check_file, path) if is_zip else None)
    except OSError as error:
        problem = "cut off" if error.errno == errno.EINVAL else error.strerror or error  # a seek to before the start
        raise CheckpointError(f"{path}: cannot be read ({problem})") from None
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        problem = next(
            (line for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line), "damaged"
        )
        raise CheckpointError(f"{path}: cannot be read safely ({problem.strip()[:200]})") from None
    except Exception as error:  # whatever a damaged pickle or zip leads to
        problem = (str(error).splitlines() or [""])[0][:150]
        raise CheckpointError(f"{path}: damaged or cut off ({type(error).__name__}: {problem})") from None


def _legacy_globals(file: IO[bytes]) -> list[str]:
    """The classes that a file in the format before torch 1.6 names: four pickles, then the storages."""
    return sorted({name for _ in range(4) for name in get_globals_in_pkl(file)})


def _placeholders(names: list[str]) -> list[tuple[Callable[..., Any], str]]:
    return [(_plain_dict if name == "collections.defaultdict" else _inert_class(name), name) for name in names]


def _plain_dict(*_args: Any) -> dict[Any, Any]:
    return {}


def _inert_class(name: str) -> type[Inert]:
    return type("Inert", (Inert,), {"name": name})


def _check_file(path: Path) -> None:
    with path.open("rb") as file:
        check_archive(path, file)


def _convert(value: Any, path: Path, check: Callable[[], None] | None) -> Any:
    """The same tree with every tensor replaced, inside inert objects too."""
    if isinstance(value, Tensor):
        return _locate(value, path, check)
    if isinstance(value, dict):
        return {key: _convert(item, path, check) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_convert(item, path, check) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Inert):
        value.args, value.state = _convert(value.args, path, check), _convert(value.state, path, check)
    return value


def _locate(tensor: Tensor, path: Path, check: Callable[[], None] | None) -> StoredTensor | LoadedTensor:
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if start is None:
        return LoadedTensor(tensor.detach())
    offset = start + tensor.storage_offset() * tensor.dtype.itemsize
    return StoredTensor(path, offset, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), check)
