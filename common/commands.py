"""The console command: `urls-to-gpt2 COMMAND …` runs the module of a command as `python -m` does.

    urls-to-gpt2 init runs
    urls-to-gpt2 corpus.clean --input pages.jsonl.zst --output clean.jsonl.zst
    urls-to-gpt2 corpus.clean --help
    eval "$(register-python-argcomplete urls-to-gpt2)"   # in ~/.bashrc: Tab completes

The commands, each with its module in brackets if that has another name:

"""

import ast
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import starmap
from pathlib import Path

from common import cli
from common.console import fail
from common.errors import InputError
from common.settings import closest

COMMANDS = {
    "init": "common.init",
    "demo": "workflow.demo",
    "corpus.blacklist": "corpus.blacklist",
    "corpus.scrape": "corpus.scrape",
    "corpus.fetch": "corpus.fetch",
    "corpus.ingest": "corpus.ingest",
    "corpus.clean": "corpus.clean",
    "corpus.dedup": "corpus.dedup",
    "corpus.repeats": "corpus.repeats",
    "corpus.decontaminate": "corpus.decontaminate",
    "corpus.train_tokenizer": "corpus.train_tokenizer",
    "corpus.tokenize": "corpus.tokenize",
    "corpus.merge_index": "corpus.merge_index",
    "corpus.index": "corpus.index",
    "corpus.sample": "workflow.provenance.sample",
    "corpus.show": "workflow.provenance.show",
    "corpus.remove": "workflow.provenance.remove",
    "training.plan": "training.plan",
    "training.train": "training.train",
    "training.evaluate": "training.evaluate",
    "training.generate": "training.generate",
    "training.trace": "workflow.provenance.trace",
    "training.kernels": "training.kernels",
    "convert.merge_mp": "convert.merge_mp",
    "convert.verify": "convert.verify",
    "convert.to_gguf": "convert.to_gguf",
    "convert.to_megatron": "convert.to_megatron",
    "convert.from_megatron": "convert.from_megatron",
    "cluster.preflight": "cluster.preflight",
    "cluster.autotune": "cluster.autotune",
    "cluster.submit": "cluster.submit",
    "cluster.status": "cluster.status",
    "cluster.logs": "cluster.logs",
    "cluster.cancel": "cluster.cancel",
    "report": "workflow.report",
    "cards": "workflow.cards",
    "demo.build": "workflow.demo.build",
    "demo.serve": "workflow.demo.serve",
}
"""The module of each command, in the order of --help."""
_ROOT = Path(__file__).resolve().parents[1]


def _described(name: str, module: str) -> str:
    """A line of --help: the first line of the module's docstring, read from its source.

    Importing all commands would take seconds.
    """
    path = _ROOT / module.replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    summary = (ast.get_docstring(ast.parse(path.read_bytes())) or "").split("\n")[0]
    return f"    {name:22} {summary}" + f" ({module})" * (name != module)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, as `python -m` does."""
    given = list(sys.argv[1:] if argv is None else argv)
    name = given[0] if given else ""
    if "_ARGCOMPLETE" in os.environ and len(words := os.environ["COMP_LINE"].split()) > 1 and words[1] in COMMANDS:
        name, os.environ["_ARGCOMPLETE"] = words[1], "2"  # the command line begins at the second word
    if name in COMMANDS:
        try:
            cli.refuse_other_copy(Path.cwd())
        except InputError as error:
            return fail(error)
        sys.argv[1:] = given[1:]
        runpy.run_module(COMMANDS[name], run_name="__main__", alter_sys=True)  # exits with the command's code
    parser = cli.parser("common.commands", (__doc__ or "") + "\n".join(starmap(_described, COMMANDS.items())))
    parser.prog, parser.usage = "urls-to-gpt2", "urls-to-gpt2 COMMAND …"
    parser.add_argument("--version", action="version", version=version("urls-to-gpt2"))
    command = parser.add_argument("command", metavar="COMMAND", help="one of the commands above")
    vars(command)["completer"] = lambda **_: list(COMMANDS)  # read by argcomplete
    parser.parse_args(given[:1])
    ends = {command.rpartition(".")[2]: command for command in COMMANDS}  # a module's name, or half of a command's
    parser.error(f"no command {name!r}{closest(ends.get(name.rpartition('.')[2], name), COMMANDS)}")


if __name__ == "__main__":
    sys.exit(main())
