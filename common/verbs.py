"""Lists the commands of a package, for `python -m corpus`, `python -m cluster` and the like. Imports none of them.

    verbs.main("corpus", ORDER)        # corpus/__main__.py

A command is a module that ends in `if __name__ == "__main__":`, or a folder with a `__main__.py`.
"""

import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from common.errors import InputError
from common.settings import closest
from common.tables import text_table

_ROOT = Path(__file__).resolve().parents[1]
_GUARD = 'if __name__ == "__main__":'


def commands(package: str, order: Sequence[str] = ()) -> dict[str, str]:
    """The first sentence about each command of a package, by its name: those in `order` first, then by name."""
    folder = _ROOT / package
    files = [*folder.glob("*.py"), *folder.glob("*/__main__.py")]
    found = {}
    for path in sorted(files):
        text = path.read_text(encoding="utf-8")
        if path != folder / "__main__.py" and _GUARD in text:
            name = path.parent.name if path.name == "__main__.py" else path.stem
            found[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return {name: found[name] for name in sorted(found, key=lambda name: (_rank(name, order), name))}


def _rank(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def main(package: str, order: Sequence[str] = (), argv: Sequence[str] | None = None) -> int:
    """Print the commands of a package; `python -m PACKAGE COMMAND …` becomes `python -m PACKAGE.COMMAND …`.

    Raises InputError for a command that does not exist.
    """
    name, *rest = [*(sys.argv[1:] if argv is None else argv), ""]
    found = commands(package, order)
    if name in ("", "-h", "--help"):
        print(text_table((f"python -m {package}.{command}", sentence) for command, sentence in found.items()))
        print("\neach explains itself with --help")
        return 0
    if name not in found:
        hint = closest(name, found) or f"; python -m {package} lists the commands"
        raise InputError(f"python -m {package}: no command {name!r}{hint}")
    replace_process([f"{package}.{name}", *rest[:-1]])


def replace_process(command: Sequence[str]) -> NoReturn:
    """Become `python -m COMMAND`; its exit code is this process's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", *command])
