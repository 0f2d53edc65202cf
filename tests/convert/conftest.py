"""Checkpoints of other toolkits, each built once."""

import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from tests.conftest import Once
from tests.convert import deepspeed_files, megatron_files

Made = Callable[..., Path]


@pytest.fixture
def made(once: Once, tmp_path: Path) -> Made:
    """`made(layout, name)`: a copy in `tmp_path` of a checkpoint of Megatron-LM or DeepSpeed."""

    def copy(layout: megatron_files.Layout | deepspeed_files.Run, name: str = "") -> Path:
        def build(folder: Path) -> None:
            if isinstance(layout, megatron_files.Layout):
                megatron_files.write(folder / "iter_0000100", layout)
            else:
                deepspeed_files.write_tag(folder / "global_step120", layout)

        built = once(f"checkpoint-{sha256(repr(layout).encode()).hexdigest()[:16]}", build)
        (folder,) = (path for path in built.iterdir() if path.is_dir())
        return Path(shutil.copytree(folder, tmp_path / (name or folder.name)))

    return copy
