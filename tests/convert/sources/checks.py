"""What the tests of all formats ask of a source: its weights in our layout, and errors of one line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from common.errors import CheckpointError
from convert.arguments import Options
from convert.assemble import assemble
from convert.sources.source import Source


def merged(source: Source, moment: str = "") -> dict[str, Tensor]:
    """Every tensor in our layout, or a moment of each."""
    return {
        name: assemble(source, name, tensor=source.moments[moment][name] if moment else None) for name in source.tensors
    }


def refused(open_folder: Callable[[Path, Options], Source], folder: Path, *parts: str, **options: object) -> None:
    """Opening raises an error of one line, which names the folder and has all `parts`, such as a file or a key."""
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder, Options(**options))  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message, message
    for part in parts:
        assert part in message, message
