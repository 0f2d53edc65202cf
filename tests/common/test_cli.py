"""Paths and settings on the command line of every step, as users write them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common import cli
from common.settings import CleanSettings
from tests.conftest import ROOT
from tests.helpers import assert_one_line_error, called, document, prose, read_shard, write_shard

# Per step: arguments, options for a file, options for a folder. The folder `in` has two shards,
# `list` holds URLs.
STEPS = {
    "corpus.blacklist": ("--input list", "--output --rejects --stats", "--shards 2 --output-dir"),
    "corpus.clean": ("--input in", "--output --rejects --stats", ""),
    "corpus.ingest": ("--input in", "--output --stats", "--shards 2 --output-dir"),
    "corpus.tokenize": ("--input in", "--output-prefix --rejects --stats", ""),
    "corpus.train_tokenizer": ("--input in train_tokenizer.vocab_size=300", "--stats", "--output-dir"),
    "corpus.merge_index": ("--inputs data", "--output-prefix --stats", ""),
    "corpus.scrape": ("--urls list", "--output --rejects --stats --archive", ""),
    "corpus.dedup run": ("--input in", "--stats", "--output-dir"),
    "corpus.repeats cut": ("--input in --repeats r repeats.units=[lines]", "--output --rejects --stats", ""),
    "corpus.repeats run": ("--input in repeats.units=[lines]", "", "--output-dir"),
    "corpus.decontaminate cut": ("--input in --files list --counts c", "--output --rejects --stats", ""),
    "corpus.decontaminate run": ("--input in --files list", "", "--output-dir"),
    "training.evaluate": ("--checkpoint c --data list", "--output", ""),
    "training.generate": ("--checkpoint c --prompts list", "--output", ""),
    "convert.merge_mp": ("--checkpoint in", "", "--output"),
    "workflow.report": ("--run in", "--output", ""),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for shard in range(2):
        texts = [prose(100 * shard + number) for number in range(3)]
        documents = [document(100 * shard + number, text) for number, text in enumerate([*texts, "short", texts[0]])]
        write_shard(Path(f"in/{shard:04d}.jsonl.zst"), documents)
    Path("list").write_text("http://example.org/a\nhttp://example.org/b.jpg\n")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("step", STEPS)
def test_what_cannot_be_written_or_is_no_input_is_refused_before_anything_is_read(folder: Path, step: str) -> None:
    before, (given, files, folders) = contents(folder), STEPS[step]
    os.mkfifo("pipe")  # reading it would block for ever
    words = given.replace("in ", "pipe ").split()
    output = ["--output", "o"] if "--output " in f"{files} " else ["--output-prefix", "o"] if "-prefix" in files else []
    output = output or [*folders.split(), "d"]
    for option in files.split():
        rest = output if output[0] != option else []
        odd = () if "prefix" in option else ("pipe", "/dev/null")
        for value in ("", "/", "in/", "list/x", *odd):
            result = called(*step.split(), *words, *rest, option, value)
            assert_one_line_error(result, value.removesuffix("/") or ("empty" if not value else "/"))
        if rest[:1] == ["--output"]:
            assert_one_line_error(called(*step.split(), *words, *rest, option, "./o"), "the output o")
    for value in ("", "list", "list/x", "/dev/null") if folders else ():
        result = called(*step.split(), *words, *folders.split(), value)
        assert_one_line_error(result, value.removesuffix("/x") or "empty")
    words[1] = ""
    assert_one_line_error(called(*step.split(), *words, *output), "empty")
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("step", "output"),
    [
        ("corpus.clean", "--output in/0000.jsonl.zst"),
        ("corpus.clean", "--output o --rejects in/../in/0001.jsonl.zst"),
        ("corpus.ingest", "--output-dir in --shards 1"),
        ("corpus.merge_index", "--output-prefix ./data"),
        ("corpus.blacklist", "--output linked"),
        ("corpus.scrape", "--output list"),
        ("corpus.dedup run", "--output-dir ./linked_in"),
        ("corpus.decontaminate run", "--output-dir in"),
        ("corpus.decontaminate cut", "--output o --stats list"),
        ("training.generate", "--output list"),
        ("training.evaluate", "--output list"),
        ("convert.merge_mp", "--output linked_in"),
    ],
)
def test_an_input_is_never_overwritten(folder: Path, step: str, output: str) -> None:
    Path("linked").symlink_to("list")
    Path("linked_in").symlink_to("in")
    for name in ("c", "data.bin", "data.idx"):
        Path(name).write_text("{}")
    before = contents(folder)
    result = called(*step.split(), *STEPS[step][0].split(), *output.split())
    assert_one_line_error(result, "would overwrite the input")
    assert contents(folder) == before


def bash(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a shell script in a folder; `step` is `python -m corpus.…`."""
    script = f'step() {{ {sys.executable} -m "corpus.$@"; }}\n{script}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)


def test_steps_stand_in_pipelines(folder: Path) -> None:
    script = """
        step clean --input in --output file.jsonl
        cat file.jsonl | step ingest --input - --output-dir ingested --shards 1
        step clean --input <(cat file.jsonl) --output piped.jsonl
    """
    result = bash(f"set -eo pipefail\n{script}", folder)
    assert result.returncode == 0, result.stderr
    kept = read_shard(folder / "file.jsonl")
    assert len(kept) == 8 and read_shard(folder / "piped.jsonl") == kept


def test_a_full_disk_is_told(folder: Path) -> None:
    write_shard(folder / "big.jsonl", [document(number, prose(number)) for number in range(2000)])
    result = bash("ulimit -f 100; step ingest --input big.jsonl --output out.jsonl", folder)
    assert_one_line_error(result, "out.jsonl: File too large")
    assert not list(folder.glob("out*"))


def parse(*words: str) -> CleanSettings:
    """The settings of a command with the verb `count`."""
    parser = cli.parser("corpus.clean", "A step.")
    count = parser.add_subparsers(dest="verb", required=True).add_parser("count")
    cli.add_settings(count, "clean")
    return cli.read_settings(parser.parse_args(["count", *words])).clean


def test_an_override_wins_over_the_file_and_the_file_over_the_default(folder: Path) -> None:
    Path("config.yaml").write_text("run: x\nurls: [list]\nclean: {language: de, min_characters: 10}\n")
    config = ("--config", "config.yaml")
    assert parse().language == "en" and not parse().filters
    assert parse(*config).language == "de"
    clean = parse("clean.language=it", *config, "clean.filters=[gopher]")
    assert (clean.language, clean.min_characters, clean.filters) == ("it", 10, ["gopher"])


def test_an_installed_copy_refuses_to_work_beside_another_one(folder: Path) -> None:
    """Snakemake and console scripts run the installed copy, `python -m` the working folder's."""
    command = ("corpus.clean", "--input", "in", "--output", "o.jsonl.zst")
    for name in ("common/errors.py", "corpus/runner.py"):
        Path(name).parent.mkdir()
        Path(name).touch()
    refused = f"{folder}: holds another copy of the toolkit than {ROOT}"
    assert_one_line_error(called("common.commands", *command), refused)
    assert called(*command).returncode == 0, "a training job runs the code of its snapshot in the folder of a clone"
