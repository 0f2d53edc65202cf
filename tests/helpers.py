"""Helpers that several test files use."""

import importlib
import io
import os
import random
import subprocess
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import orjson

from common import cli
from common.files import MARK, Document, document_writer, read_documents, read_lines

PATIENCE = 500
"""Seconds after which what a test waits for counts as lost. Twenty processes on two cores are no
failure.

Less than pytest's limit for a whole test, so that the message is the helper's. Waits without a
message end there.
"""


def run_python(page: str, heading: str) -> None:
    """Run the first Python example under a heading of a page in the current folder."""
    text = (Path(__file__).parents[1] / page).read_text(encoding="utf-8").split(f"{heading}\n")[1]
    exec(text.split("```python\n")[1].split("```")[0], {})


def new_seed() -> int:
    """A seed for what a test draws. pytest shows it if the test fails; TEST_SEED=N draws the same
    again.
    """
    seed = int(os.environ.get("TEST_SEED") or random.randrange(1 << 32))
    print(f"TEST_SEED={seed}")
    return seed


def write_shard(path: Path, documents: list[Document]) -> Path:
    """Write a shard with these documents."""
    with document_writer(path) as write:
        for document in documents:
            write(document)
    return path


def read_shard(path: Path) -> list[Document]:
    """All documents of a shard."""
    return list(read_documents(path))


def read_rejects(path: Path) -> list[Document]:
    """The documents that a step dropped, without the mark that each line has."""
    dropped = [orjson.loads(line) for line in read_lines(path)]
    assert all(found.pop(MARK) for found in dropped)
    return dropped


def document(number: int, text: str, **more: Any) -> Document:
    """A document whose id is made from its number."""
    return {"id": f"{number:016x}", "url": f"http://site.example/{number}", "text": text, **more}


def prose(seed: int, words: int = 200) -> str:
    """English sentences of common words: long enough to pass every filter, different for every
    seed.
    """
    rng = random.Random(seed)
    vocabulary = (
        "the a of and to in that it with for was on are as at be this have from or had by but what some we can out "
        "other were all there when up use your how said each she which their time will way about many then them write "
        "would like so these her long make thing see him two has look more day could go come did number sound no most "
        "people my over know water than call first who may down side been now find new work part take get place made "
        "live where after back little only round man year came show every good me give our under name very through "
        "just form sentence great think say help low line differ turn cause much mean before move right boy old too "
        "same tell does set three want air well also play small end put home read hand port large spell add even land "
        "here must big high such follow act why ask men change went light kind off need house picture try us again "
        "animal point mother world near build self earth father head stand own page should country found answer school"
    ).split()
    text = " ".join(rng.choice(vocabulary) for _ in range(words))
    return ". ".join(part.capitalize() for part in text.split(" the ")) + "."


def assert_one_line_error(result: "subprocess.CompletedProcess[str]", *parts: str, code: int = 2) -> None:
    """Assert the exit code, and one line on stderr that contains all `parts`."""
    assert result.returncode == code, result
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    for part in parts:
        assert part in lines[0], lines[0]


Main = Callable[[list[str]], int]


def main_of(module: str) -> Main:
    """What `python -m MODULE` calls."""
    found = importlib.import_module(module)
    program = importlib.import_module(f"{module}.__main__") if hasattr(found, "__path__") else found
    main: Main = program.main
    return main


def run_main(main: Main, *arguments: object) -> int:
    """Run a command in this process, as its `__main__` does; returns the exit code."""
    try:
        return cli.run(lambda: main([str(argument) for argument in arguments]))
    except SystemExit as leaving:  # --help, or options that cannot be parsed
        assert isinstance(leaving.code, int)
        return leaving.code


def called(command: str | Main, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """How a command ends, a module's name or its `main`, run in this process: its exit code and
    output.
    """
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="", write_through=True) for _ in range(2))
    with redirect_stdout(output), redirect_stderr(errors):
        code = run_main(main_of(command) if isinstance(command, str) else command, *arguments)
    said = [stream.buffer.getvalue().decode() for stream in (output, errors)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess([command, *arguments], code, *said)


def wait_for(what: Callable[[], object]) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)
