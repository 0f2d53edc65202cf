"""The parser of every command: argparse, with settings as `section.key=value` and checked paths."""

import argparse
import os
import sys
from typing import Any, NoReturn

from common.cli.option_types import check_paths
from common.console import QUIET
from common.settings import closest


class Parser(argparse.ArgumentParser):
    """argparse with `section.key=value` overrides, checked paths, one-line errors and shell completion."""

    keys: frozenset[str] = frozenset()
    """First parts that an override `section.key=value` may have; empty for a command without settings."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.add_argument("--quiet", action="store_true", default=argparse.SUPPRESS, help="show no progress")

    def error(self, message: str) -> NoReturn:
        """Print one line, without argparse's usage block, and exit with code 2."""
        if message.startswith("unrecognized arguments: -"):
            message += closest(message.split()[2], self._option_string_actions)
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; if a shell asks for completions of a command line, print them and exit."""
        if "_ARGCOMPLETE" in os.environ:
            import argcomplete

            argcomplete.autocomplete(self)
        return super().parse_args(args, namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does (verbs, too), collect every `section.key=value`, and check the paths."""
        given = list(sys.argv[1:] if args is None else args)
        overrides = [text for text in given if self._is_override(text)]
        found, rest = super().parse_known_args([text for text in given if text not in overrides], namespace)
        if self.keys:  # most likely a misspelt section: validation names the closest one
            unknown = [text for text in rest if "=" in text and not text.startswith("-")]
            rest = [text for text in rest if text not in unknown]
            found.overrides = [*overrides, *unknown]
        if found.__dict__.pop("quiet", False):
            os.environ[QUIET] = "1"  # of the processes that it starts, too
        check_paths(self._given(found))
        return found, rest

    def _is_override(self, text: str) -> bool:
        """Whether an argument is `section.key=value` and no file."""
        key, separator, _ = text.partition("=")
        return bool(separator) and key.split(".")[0] in self.keys and not os.path.lexists(text)

    def _given(self, found: argparse.Namespace) -> list[tuple[Any, Any]]:
        """(type, value) of each argument that was given."""
        given = []
        for action in self._actions:
            value = getattr(found, action.dest, None)
            values = value if isinstance(value, list) else [value]
            given += [(action.type, one) for one in values if one is not None]
        return given


def parser(module: str, doc: str | None) -> Parser:
    """A parser for `python -m MODULE` whose help is the module's docstring, examples and all."""
    return Parser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
