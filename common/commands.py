"""The console command: `urls-to-gpt2 corpus.clean …` is `python -m corpus.clean …`, and `init` is common.init.

    urls-to-gpt2 init runs
    urls-to-gpt2 corpus.clean --input pages.jsonl.zst --output clean.jsonl.zst
    urls-to-gpt2 corpus.clean --help
    eval "$(register-python-argcomplete urls-to-gpt2)"      # in ~/.bashrc: Tab completes commands and options

The commands:

"""

import ast
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from common import cli
from common.console import fail
from common.errors import InputError
from common.settings import closest

COMMANDS = (
    "common.init", "workflow.demo",
    "corpus.blacklist", "corpus.scrape", "corpus.ingest", "corpus.clean", "corpus.dedup", "corpus.repeats",
    "corpus.decontaminate", "corpus.train_tokenizer", "corpus.tokenize", "corpus.merge_index", "corpus.index",
    "workflow.provenance.sample", "workflow.provenance.show", "workflow.provenance.remove",
    "training.plan", "training.train", "training.evaluate", "training.generate", "workflow.provenance.trace",
    "training.probe", "training.kernels",
    "convert.merge_mp", "convert.verify", "convert.to_gguf", "convert.to_megatron", "convert.from_megatron",
    "cluster.preflight", "cluster.autotune", "cluster.submit", "cluster.status", "cluster.logs", "cluster.cancel",
    "workflow.report", "workflow.cards", "workflow.demo.build", "workflow.demo.serve",
)  # fmt: skip
"""Every module that people run, the first ones first."""
VERBS = {
    module.removeprefix("common.")
    .replace("workflow.provenance.trace", "training.trace")
    .replace("workflow.provenance.", "corpus.")
    .removeprefix("workflow."): module
    for module in COMMANDS
}
"""Modules by the command's name."""
_ROOT = Path(__file__).resolve().parents[1]


def _first_line(module: str) -> str:
    """The first line of a command's docstring, read from its source: importing all commands takes seconds."""
    path = _ROOT / module.replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_bytes())) or "").split("\n")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, as `python -m` does."""
    given = list(sys.argv[1:] if argv is None else argv)
    verb = given[0] if given else ""
    if "_ARGCOMPLETE" in os.environ and len(words := os.environ["COMP_LINE"].split()) > 1 and words[1] in VERBS:
        verb, os.environ["_ARGCOMPLETE"] = words[1], "2"  # the command line begins at the second word
    if verb in VERBS:
        try:
            cli.refuse_other_copy(Path.cwd())
        except InputError as error:
            return fail(error)
        sys.argv[1:] = given[1:]
        runpy.run_module(VERBS[verb], run_name="__main__", alter_sys=True)  # exits with the command's code
    lines = (f"    {name:22} {_first_line(module)}" for name, module in VERBS.items())
    parser = cli.parser("common.commands", (__doc__ or "") + "\n".join(lines))
    parser.prog, parser.usage = "urls-to-gpt2", "urls-to-gpt2 COMMAND …"
    parser.add_argument("--version", action="version", version=version("urls-to-gpt2"))
    command = parser.add_argument("command", metavar="COMMAND", help="one of the commands above")
    vars(command)["completer"] = lambda **_: list(VERBS)  # read by argcomplete
    parser.parse_args(given[:1])
    parser.error(f"no command {verb!r}{closest(verb, VERBS)}")


if __name__ == "__main__":
    sys.exit(main())
