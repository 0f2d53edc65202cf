"""The command line of a step in phases: a table says what each phase takes and does.

phases = (Phase("count", _count, "first phase: count in a shard", (SHARD, cli.add_workers)), …)
run_phase("corpus.repeats", __doc__, "repeats", phases, argv)
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from common import cli
from common.settings import Settings

Option = Callable[[Any], object]
"""Adds an option to a parser, as `cli.add_workers` does."""


def option(name: str, **settings: Any) -> Option:
    """An option that must be given, unless `required=False`."""
    return lambda parser: parser.add_argument(name, **{"required": True, **settings})


SHARD = option("--input", type=cli.input_path, metavar="FILE", help="shard of documents")


class Phase(NamedTuple):
    """A subcommand."""

    name: str
    action: Callable[[argparse.Namespace, Settings], None]
    summary: str
    options: Sequence[Option]


def run_phase(name: str, doc: str | None, section: str, phases: Sequence[Phase], argv: Sequence[str] | None) -> int:
    """Run the phase that a command line names, with its settings; returns the exit code."""
    parser = cli.parser(name, doc)
    commands = parser.add_subparsers(dest="phase", required=True, metavar="PHASE")
    for phase in phases:
        command = commands.add_parser(phase.name, help=phase.summary)
        command.set_defaults(action=phase.action)
        for add_to in phase.options:
            add_to(command)
        if not command.keys:  # cli.add_step_options has added them
            cli.add_settings(command, section)
    arguments = parser.parse_args(argv)
    arguments.action(arguments, cli.read_settings(arguments))
    return 0
