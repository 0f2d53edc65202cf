"""Paths on the command line of every step, as users write them."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from common.errors import ConfigError, InputError
from tests.conftest import ROOT
from tests.helpers import document, prose, read_rejects, read_shard, write_shard

# Command lines without the option that is tested; the folder `in` has two shards, `list` holds URLs.
STEPS = {
    "corpus.blacklist": ["--input", "list"],
    "corpus.clean": ["--input", "in"],
    "corpus.ingest": ["--input", "in"],
    "corpus.tokenize": ["--input", "in"],
    "corpus.train_tokenizer": ["--input", "in", "--vocab-size", "300"],
    "corpus.merge_index": ["--inputs", "data"],
    "corpus.scrape": ["--urls", "list"],
    "corpus.dedup run": ["--input", "in"],
    "corpus.dedup signatures": ["--input", "in/0000.jsonl.zst"],
    "corpus.dedup bands": ["--signatures", "in", "--part", "0/1"],
    "corpus.dedup filter": ["--input", "in/0000.jsonl.zst", "--clusters", "c"],
    "corpus.decontaminate run": ["--input", "in", "--files", "list"],
    "corpus.decontaminate count": ["--input", "in", "--files", "list"],
    "corpus.decontaminate cut": ["--input", "in", "--files", "list", "--counts", "c"],
    "training.evaluate": ["--checkpoint", "c", "--data", "list"],
    "training.generate": ["--checkpoint", "c", "--prompts", "list"],
    "convert.merge_mp": ["--checkpoint", "in"],
    "report": ["--run", "in"],
    "demo.build": [],
}
FILES = {  # options for a file
    "corpus.blacklist": ["--output", "--rejects", "--stats"],
    "corpus.clean": ["--output", "--rejects", "--stats"],
    "corpus.ingest": ["--output", "--stats"],
    "corpus.tokenize": ["--output-prefix", "--rejects", "--stats"],
    "corpus.train_tokenizer": ["--stats"],
    "corpus.merge_index": ["--output-prefix", "--stats"],
    "corpus.scrape": ["--output", "--rejects", "--stats", "--archive"],
    "corpus.dedup run": ["--stats"],
    "corpus.dedup signatures": ["--output"],
    "corpus.dedup bands": ["--output"],
    "corpus.dedup filter": ["--stats"],
    "corpus.decontaminate count": ["--output"],
    "corpus.decontaminate cut": ["--output", "--rejects", "--stats"],
    "training.evaluate": ["--output"],
    "training.generate": ["--output"],
    "report": ["--output"],
}
FOLDERS = {  # options for a folder
    "corpus.blacklist": ["--shards", "2", "--output-dir"],
    "corpus.ingest": ["--shards", "2", "--output-dir"],
    "corpus.train_tokenizer": ["--output-dir"],
    "corpus.dedup run": ["--output-dir"],
    "corpus.dedup filter": ["--output-dir"],
    "corpus.decontaminate run": ["--output-dir"],
    "convert.merge_mp": ["--output"],
    "demo.build": ["--output"],
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


def problem(step: str, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one-line error with which a command refuses its arguments."""
    module, _, verb = step.partition(" ")
    name = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
    capsys.readouterr()
    try:
        import_module(name).main([*([verb] if verb else []), *arguments])
    except InputError as error:
        return str(error)
    except SystemExit as stop:
        assert stop.code == 2
        return capsys.readouterr().err
    raise AssertionError(f"{step} {' '.join(arguments)} is not refused")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(("step", "option"), [(step, option) for step, options in FILES.items() for option in options])
def test_what_cannot_be_written_is_refused_before_anything_is_read(
    folder: Path, step: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo("pipe")  # reading it would block for ever
    before = contents(folder)
    rest = ["--output", "o"] if "--output" in FILES[step] and option != "--output" else []
    rest += ["--output-prefix", "o"] if "--output-prefix" in FILES[step] and option != "--output-prefix" else []
    rest += [*FOLDERS[step], "d"] if step in FOLDERS and not rest and option == "--stats" else []
    for value in ("", ".", "/", "..", "in/", "list/x", *(["in"] if option != "--output-prefix" else [])):
        found = problem(step, [*STEPS[step], *rest, option, value], capsys)
        assert re.search(r"empty string|is a folder|below a file", found) and len(found.splitlines()) == 1, found
    if rest[:1] == ["--output"]:
        assert "is the same file as the output o" in problem(step, [*STEPS[step], *rest, option, "./o"], capsys)
    assert contents(folder) == before


@pytest.mark.parametrize("step", FOLDERS)
def test_a_folder_that_is_none_is_refused(folder: Path, step: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("", "list", "list/x", "/dev/null"):
        found = problem(step, [*STEPS[step], *FOLDERS[step], value], capsys)
        assert re.search(r"empty string|is not a folder", found), found


@pytest.mark.parametrize("step", STEPS)
def test_the_empty_string_is_no_input(folder: Path, step: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = STEPS[step]
    for place in [place for place, option in enumerate(options) if option.startswith("--") and option != "--part"]:
        if options[place] != "--vocab-size":
            found = problem(step, [*options[: place + 1], "", *options[place + 2 :]], capsys)
            assert "empty string" in found


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        ("corpus.clean", ["--output", "in/0000.jsonl.zst"]),
        ("corpus.clean", ["--input", "in/*.zst", "--output", "o", "--rejects", "in/../in/0001.jsonl.zst"]),
        ("corpus.tokenize", ["--output-prefix", "o", "--stats", "in/0001.jsonl.zst"]),
        ("corpus.ingest", ["--output", "in/0001.jsonl.zst"]),
        ("corpus.ingest", ["--output-dir", "in", "--shards", "1"]),
        ("corpus.blacklist", ["--output", "list"]),
        ("corpus.blacklist", ["--output", "linked"]),
        ("corpus.scrape", ["--output", "list"]),
        ("corpus.dedup run", ["--output-dir", "in"]),
        ("corpus.dedup run", ["--output-dir", "./linked_in"]),
        ("corpus.dedup filter", ["--output-dir", "in"]),
        ("corpus.dedup signatures", ["--output", "in/0000.jsonl.zst"]),
        ("corpus.decontaminate run", ["--output-dir", "in"]),
        ("corpus.decontaminate count", ["--output", "list"]),
        ("corpus.decontaminate cut", ["--output", "o", "--stats", "in/0000.jsonl.zst"]),
        ("training.generate", ["--output", "list"]),
        ("training.evaluate", ["--output", "list"]),
        ("convert.merge_mp", ["--output", "linked_in"]),
    ],
)
def test_an_input_is_never_overwritten(
    folder: Path, step: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("linked").symlink_to("list")
    Path("linked_in").symlink_to("in")
    Path("c").write_text("{}")
    before = contents(folder)
    assert "would overwrite the input" in problem(step, [*STEPS[step], *arguments], capsys)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("step", "key"),
    [
        ("corpus.blacklist", "blacklist.min_scores"),
        ("corpus.ingest", "max_bad_shares"),
        ("corpus.clean", "clean.min_character"),
        ("corpus.tokenize", "tokenize.min_token"),
        ("corpus.train_tokenizer", "train_tokenizer.shares"),
        ("corpus.dedup run", "dedup.thresholds"),
        ("corpus.dedup verify", "dedup.thresholds"),
        ("corpus.decontaminate run", "decontaminate.max_word"),
        ("corpus.decontaminate cut", "decontaminate.max_word"),
    ],
)
def test_every_step_and_verb_takes_keys_and_names_the_closest_one(folder: Path, step: str, key: str) -> None:
    module, _, verb = step.partition(" ")
    name = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
    steps = {**STEPS, "corpus.dedup verify": ["--signatures", "in", "--pairs", "in", "--block", "0/1"]}
    output = ["--output-dir", "d"] if step.endswith(" run") or "train" in step else ["--output", "o"]
    output = ["--output-prefix", "o"] if step == "corpus.tokenize" else output
    with pytest.raises(ConfigError, match=rf"command line: unknown key '{key}' \(did you mean '"):
        import_module(name).main([*([verb] if verb else []), f"{key}=1", *steps[step], *output])


def test_outputs_of_a_folder_may_not_be_the_statistics(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, name in (
        ("corpus.dedup run", "removed/0001.jsonl.zst"),
        ("corpus.ingest", "0001.jsonl.zst"),
        ("corpus.blacklist", "0001.txt"),
        ("corpus.train_tokenizer", "vocab.bpe"),
    ):
        found = problem(step, [*STEPS[step], *FOLDERS[step], "d", "--stats", f"d/{name}"], capsys)
        assert "is the same file as the output" in found
    arguments = ["--input", "in", "--output-prefix", "o", "--stats", "o_text_document.idx"]
    found = problem("corpus.tokenize", arguments, capsys)
    assert "is the same file as the output" in found


def bash(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a shell script in a folder; `step` is `python -m corpus.…`."""
    return subprocess.run(
        ["bash", "-c", f'step() {{ {sys.executable} -m "corpus.$@"; }}\n{script}'],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_steps_stand_in_pipelines(folder: Path) -> None:
    script = """
        step clean --input in --output file.jsonl --rejects rejects.jsonl
        step clean --input in --output /dev/stdout --rejects /dev/null --stats /dev/null > redirected.jsonl
        step clean --input in --output /dev/stdout --rejects >(cat > rejects_too.jsonl) | cat > piped.jsonl
        cat file.jsonl | step ingest --input - --output-dir ingested --shards 1
        step clean --input <(cat file.jsonl) --output >(cat > substituted.jsonl)
        step tokenize --input <(cat file.jsonl) --output-prefix t --rejects /dev/null --stats /dev/stderr
        step blacklist --input <(cat list) - --output /dev/stdout < /dev/null > kept
        step clean --input in --output /dev/stdout | head -c 9 > nine
        sleep 0.5
    """
    result = bash(f"set -eo pipefail\n{script}", folder)
    assert result.returncode == 0, result.stderr
    kept = read_shard(folder / "file.jsonl")
    assert len(kept) == 8
    for name in ("redirected", "piped", "substituted"):
        assert read_shard(folder / f"{name}.jsonl") == kept, name
    assert read_rejects(folder / "rejects_too.jsonl") == read_rejects(folder / "rejects.jsonl")
    assert (folder / "kept").read_text() == "http://example.org/a\n"
    assert Path("/dev/null").is_char_device()


def test_a_reader_that_goes_away_or_a_full_disk_is_told(folder: Path) -> None:
    big = write_shard(folder / "big.jsonl", [document(number, prose(number)) for number in range(2000)])
    result = bash(f"step ingest --input {big} --output >(true)", folder)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1) and "Broken pipe" in result.stderr
    result = bash(f"ulimit -f 100; step ingest --input {big} --output out.jsonl", folder)
    assert (result.returncode, result.stderr) == (2, "error: out.jsonl: File too large\n")
    assert not list(folder.glob("out*"))
    result = bash(f"step ingest --input {big} --output /dev/full", folder)
    assert (result.returncode, result.stderr) == (2, "error: /dev/full: No space left on device\n")


def test_no_option_of_any_command_is_a_bare_path() -> None:
    for package in ("common", "corpus", "training", "convert", "report", "demo", "cluster", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            assert "type=Path" not in path.read_text(encoding="utf-8"), f"{path}: say by the type what the path is for"
