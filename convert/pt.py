"""Read untrusted .pt files: nothing in them is executed, and tensors stay on the disk.

A pickle names classes and functions, and an ordinary unpickler imports and calls them. Here each
name becomes a new empty class that keeps what the pickle gives it (`Placeholder`).

    since torch 1.6    zip archive, not compressed: data.pkl, and data/KEY for each storage, each
                       with a CRC32 (or 0)
    before             pickles: magic number, 1001, sizes of C types, object, keys of its storages;
                       then per key the number of elements (little-endian int64) and the data

A storage in the pickle is a persistent id: ("storage", type, key, location, elements; before torch
1.6 a view, too).
"""

import math
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO, RawIOBase
from pathlib import Path
from threading import Lock
from typing import IO, Any, cast
from zipfile import ZIP_STORED, ZipFile

import torch
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION
from torch.storage import _storage_type_to_dtype_map

from common.errors import CheckpointError
from training.checkpoint.files import StoredTensor

_CHUNK = 1 << 20  # bytes per read
_DTYPES = {f"torch.{name}": dtype for name, dtype in _storage_type_to_dtype_map().items()}
_SAFE: dict[str, Any] = {  # types that cannot be changed, and whose constructors only hold values
    "torch.Size": torch.Size,
    "collections.OrderedDict": OrderedDict,
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}

_Storages = Callable[[str, int, int], int]
"""Key, elements and bytes of a storage -> where it begins in the file."""


class Placeholder:
    """An object of a class that is not imported."""

    name = ""
    """The class's full name."""
    args: tuple[Any, ...] = ()
    """The arguments of the constructor."""
    state: Any = None
    """What the pickle sets: attributes, which the placeholder has too, or anything else."""

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
    """The content of the next pickle in a file; nothing that it names is imported.

    The pickle may name torch.Size, torch's dtypes, OrderedDict, and what begins with one of `names`
    (None: anything). `known` are functions to call for names; they must not be shared between
    calls, because a pickle can set their attributes. `persistent` gives the objects of persistent
    ids. Raises ForeignClassError for other names, or any other exception for a damaged pickle.
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


def fields(value: Any) -> Mapping[str, Any]:
    """The items of a dict, or the attributes of a placeholder such as a Namespace; else empty."""
    state = value.state if isinstance(value, Placeholder) else value
    return state if isinstance(state, Mapping) else {}


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"a": {"b.c": 1}}` -> ("a.b.c", 1)."""
    for key, value in fields(tree).items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def enum_member(value: Any) -> str | None:
    """The name of an Enum's member that Python before 3.11.4 pickled as `getattr(CLASS, NAME)`."""
    is_member = isinstance(value, Placeholder) and value.name == "builtins.getattr" and len(value.args) == 2
    return str(value.args[1]) if is_member else None


def number_in(*values: Any) -> int | None:
    """The first value that is a number, or a tensor or an enumeration's member of one."""
    for value in values:
        plain = next(iter(value.args), None) if isinstance(value, Placeholder) else value
        if isinstance(plain, StoredTensor):
            plain = plain.read().item() if math.prod(plain.shape) == 1 else None
        if isinstance(plain, int | float) and not isinstance(plain, bool):
            return int(plain)
    return None


def once(compare: Callable[[Path], None], path: Path) -> Callable[[], None]:
    """A check that runs `compare` on its first call; other threads wait for it."""
    lock, done = Lock(), False

    def check() -> None:
        nonlocal done
        with lock:
            if not done:
                compare(path)
                done = True

    return check


def load_pt(path: Path) -> Any:
    """The content of a .pt file: tensors as `StoredTensor`, objects of any class as `Placeholder`.

    Raises CheckpointError if it is no .pt file, damaged or cut off; tensors are checked when read.
    """
    with damage_named(path), path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":
            return load_archive(path, check=once(check_archive, path))
        file.seek(0)
        return _load_legacy(path, file)


@contextmanager
def damage_named(path: Path, record: str = "") -> Iterator[None]:
    """Turn any error into a CheckpointError of one line; `record` names the part of the file."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # whatever a damaged pickle or archive leads to
        problem = (str(error).splitlines() or [""])[0][:150]
        raise CheckpointError(
            f"{path}: damaged or cut off ({record}{type(error).__name__}: {problem}); copy it again"
        ) from None


def load_archive(
    path: Path, start: int = 0, length: int | None = None, check: Callable[[], None] | None = None, record: str = ""
) -> Any:
    """The content of an archive of torch.save: a whole file, or `length` bytes of it.

    `check` is called before a tensor is read. Errors: see `check_archive`.
    """
    with _open_archive(path, start, length, record) as (archive, file):
        _check_members(path, archive, record, tensors=False)
        members = {name.partition("/")[2]: archive.getinfo(name) for name in archive.namelist()}

        def begin(name: str) -> int:
            file.seek(members[name].header_offset + 26)  # the lengths of the local header's name and extra field
            return file.tell() + 4 + sum(int.from_bytes(file.read(2), "little") for _ in range(2))

        def place(key: str, _count: int, size: int) -> int:
            if members[f"data/{key}"].file_size < size:
                raise ValueError(f"data/{key} is smaller than its tensors, {size} bytes")
            return start + begin(f"data/{key}")

        file.seek(begin("data.pkl"))  # zipfile would compare it with a CRC32 that was not computed, too
        return _load_object(path, BytesIO(file.read(members["data.pkl"].file_size)), place, check)


def check_archive(path: Path, start: int = 0, length: int | None = None, record: str = "") -> None:
    """Compare an archive of torch.save with its CRC32s; CheckpointError names the bad member."""
    with _open_archive(path, start, length, record) as (archive, _):
        _check_members(path, archive, record, tensors=True)


@contextmanager
def _open_archive(path: Path, start: int, length: int | None, record: str) -> Iterator[tuple[ZipFile, IO[bytes]]]:
    with damage_named(path, record), path.open("rb") as whole:
        file = cast(IO[bytes], _Part(whole, start, path.stat().st_size if length is None else length))
        with ZipFile(file) as archive:
            yield archive, file


def _check_members(path: Path, archive: ZipFile, record: str, *, tensors: bool) -> None:
    """Compare members with their CRC32, with or without those of tensors."""
    for member in archive.infolist():
        if member.compress_type != ZIP_STORED:
            raise CheckpointError(
                f"{path}: {record}{member.filename} is compressed; unpack the file, and save it again with torch.save"
            )
        if member.CRC and (tensors or "/data/" not in member.filename):
            with archive.open(member) as content:
                while content.read(_CHUNK):
                    pass


def _load_legacy(path: Path, file: IO[bytes]) -> Any:
    """Reads the object twice: the first pass gives the sizes of the storages after it."""
    if load_plain(file, ()) != MAGIC_NUMBER or load_plain(file, ()) != PROTOCOL_VERSION:
        raise CheckpointError(f"{path}: not a .pt file")
    load_plain(file, ())  # sizes of C types
    begin, sizes, places = file.tell(), dict[str, tuple[int, int]](), dict[str, int]()
    _load_object(path, file, lambda key, *size: sizes.setdefault(key, size)[0] * 0, None)
    for key in load_plain(file, ()):
        count, size = sizes[key]
        if int.from_bytes(file.read(8), "little") != count:
            raise CheckpointError(f"{path}: damaged or cut off (a storage of another size than its tensor)")
        places[key] = file.tell()
        if file.seek(size, os.SEEK_CUR) > os.fstat(file.fileno()).st_size:
            raise CheckpointError(f"{path}: cut off (the data of its last tensors is missing)")
    file.seek(begin)
    return _load_object(path, file, lambda key, *_: places[key], None)


def _load_object(path: Path, file: IO[bytes], place: _Storages, check: Callable[[], None] | None) -> Any:
    """The object of a pickle whose storages lie at `place`."""

    def storage(saved: Any) -> tuple[int, int, torch.dtype | None]:
        _kind, kind, key, _location, count, *view = saved
        if view and view[0] is not None:
            raise CheckpointError(f"{path}: storages that are views, as torch 0.x wrote them; save it again with torch")
        dtype = _DTYPES.get(kind.name)  # None if untyped: the elements are bytes
        size = count * (dtype.itemsize if dtype else 1)
        return place(key, count, size), size, dtype

    def rebuild(stored: Any, first: int, shape: Any, stride: Any, *_flags: Any) -> StoredTensor:
        begin, size, dtype = stored
        span = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if min(first, *shape, *stride, 0) < 0 or (math.prod(shape) and (first + span) * dtype.itemsize > size):
            raise ValueError("a tensor outside of its storage")
        return StoredTensor(path, begin + first * dtype.itemsize, dtype, tuple(shape), tuple(stride), check)

    known: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor": rebuild,
        "torch._utils._rebuild_tensor_v2": rebuild,
        "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
        "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
        "torch._tensor._rebuild_from_type_v2": lambda make, _kind, args, _state: make(*args),
        "collections.defaultdict": lambda *_: {},
    }
    return load_plain(file, None, known, storage)


class _Part(RawIOBase):
    """A range of a file. PyTorch's class is slow to import, and seeks wrongly from the end."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the first byte")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        wanted = memoryview(buffer)[: max(self._length - self._position, 0)]
        self._file.seek(self._start + self._position)
        count: int = self._file.readinto(wanted)  # type: ignore[attr-defined]
        self._position += count
        return count
