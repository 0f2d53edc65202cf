"""Every command takes the same paths for a checkpoint, and reads the one that each path means."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import cli
from common.commands import COMMANDS
from convert.merge_mp import merge
from tests.conftest import Once
from tests.helpers import called, main_of
from tests.training.helpers import copy_run
from training import checkpoint

# what a command is given besides the checkpoint, where it has the option
GIVEN: dict[str, tuple[object, ...]] = {
    "data": ("DATA",),
    "max_tokens": (16,),
    "prompt": ("x",),
    "allow_no_tokenizer": (),
    "dry_run": (),
    "output": ("NEW",),
    "tp": (1,),
    "format": ("v3",),
    "config": ("RUN/config.yaml",),
    "model": ("tiny", "run=NEW", "data=[{prefix: DATA, weight: 1}]"),
}
MEANT = {
    "models/tiny": "iter_0000020",
    "models/tiny/latest": "iter_0000020",
    "models/tiny/best": "iter_0000010",
    "models/tiny/iter_0000010": "iter_0000010",
    "merged": None,
}


@pytest.fixture(scope="module")
def run(once: Once, tiny_run: Path) -> Path:
    """A run with checkpoints 10, the best, and 20, the newest; and its merged folder."""

    def build(folder: Path) -> None:
        copy_run(tiny_run, folder)
        (folder / "models/tiny/best").write_text("iter_0000010\n")
        merge(folder / "models/tiny", folder / "merged")

    return once("checkpoint-paths", build)


def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """Every command that takes a checkpoint, by the type of its argument; and its words, the
    checkpoint's last.
    """

    class Parsed(Exception):
        pass

    def parse(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Parsed(self)

    for command in COMMANDS.values():
        with monkeypatch.context() as patched, pytest.raises((Parsed, SystemExit)) as parsed:
            patched.setattr(argparse.ArgumentParser, "parse_args", parse)
            main_of(command)([])
        parser = parsed.value.args[0]
        words, flag = list[object](), list[str]()
        for action in parser._actions if isinstance(parser, argparse.ArgumentParser) else []:
            if action.type is cli.checkpoint_path:
                flag = [command, *action.option_strings[:1]]
            elif action.dest in GIVEN:
                words += [action.option_strings[0], *GIVEN[action.dest]]
        if flag:
            yield command, [*map(str, words), *flag[1:]]


def test_every_command_reads_the_checkpoint_that_a_path_means(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, found, taking = checkpoint.resolve, set[str](), list[str]()

    def spy(path: Path) -> Any:
        manifest = resolve(path)
        if manifest.path.is_relative_to(run):  # not one that the command wrote
            found.add(manifest.path.name)
        return manifest

    monkeypatch.setattr(checkpoint, "resolve", spy)
    for command, words in commands(monkeypatch):
        taking.append(command)
        for number, (path, meant) in enumerate(MEANT.items()):
            found.clear()
            new = tmp_path / f"{command}-{number}"
            names = {"NEW": new, "RUN": run, "DATA": run / "dataset/corpus_text_document"}
            given = list(words)
            for name, value in names.items():
                given = [word.replace(name, str(value)) for word in given]
            done = called(command, *given, f"{run}/{path}")
            if command == "convert.to_gguf":  # llama.cpp needs merges
                assert "gguf" in done.stderr or f"{meant or path}: has no tokenizer" in done.stderr
            else:
                assert done.returncode == 0, (command, done.stderr)
                assert found == ({meant} if meant else set()), (command, path)
    assert {"training.evaluate", "convert.merge_mp", "convert.verify"} <= set(taking)


def test_no_other_option_is_called_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = {command for command, _ in commands(monkeypatch)}
    assert {name for name in COMMANDS.values() if "--checkpoint" in called(name, "--help").stdout} <= taking
