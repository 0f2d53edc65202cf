"""Run a command in this process, as its `__main__` does; a process is needed only where the process is the point."""

import subprocess
from collections.abc import Sequence
from importlib import import_module, util

import pytest

from common import cli


def here(capsys: pytest.CaptureFixture[str], module: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """The exit code and the output of `python -m MODULE ARGUMENTS…`."""
    words: Sequence[str] = [*map(str, arguments)]
    package = util.find_spec(module)
    whole = bool(package and package.submodule_search_locations)
    main = import_module(f"{module}.__main__" if whole else module).main
    capsys.readouterr()
    try:
        code = cli.run(lambda: main(words), signals=False)
    except SystemExit as stop:
        code = int(stop.code or 0)
    return subprocess.CompletedProcess([module, *words], code, *capsys.readouterr())
