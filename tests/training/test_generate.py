"""The command continues prompts from options, files and the terminal, and reports mistakes in one line."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.settings import GenerateSettings
from common.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.training.helpers import run_main
from tests.training.test_evaluate import folder  # noqa: F401  (a fixture)
from training.generate import main
from training.inference.load import load_model
from training.inference.prompts import read_prompts
from training.inference.sampling import generate


def test_prompts_are_lines_or_json_objects(tmp_path: Path) -> None:
    lines, objects = tmp_path / "a.txt", tmp_path / "a.jsonl"
    lines.write_text("One\n\nDrei Füße\n")
    assert read_prompts(lines) == [{"prompt": "One"}, {"prompt": ""}, {"prompt": "Drei Füße"}]
    objects.write_text('{"id": 7, "prompt": "One\\ntwo"}\n')
    assert read_prompts(objects) == [{"id": 7, "prompt": "One\ntwo"}]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "empty.txt: no prompts"),
        ("bytes.txt", b"fine\n\xff\n", "bytes.txt:2: "),
        ("torn.jsonl", b'{"prompt": "x"}\n{"prompt', "torn.jsonl:2: "),
        ("key.jsonl", b'{"text": "x"}', "key.jsonl:1: not a JSON object with a string under 'prompt'"),
        ("list.jsonl", b"[1]", "list.jsonl:1: not a JSON object"),
        ("long.txt", b"fine\n" + b"one two " * 10, "prompt 2: 21 tokens, the model has room for 16"),
    ],
)
def test_unusable_prompts_give_one_line_and_write_nothing(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    name: str,
    content: bytes,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(content)
    output = tmp_path / "out.jsonl"
    assert run_main(main, "--checkpoint", folder, "--prompts", tmp_path / name, "--output", output) == 2
    printed, error = capsys.readouterr()
    assert says in error and error.count("\n") == 1 and not printed
    assert not output.exists()


def test_the_command_continues_a_file_of_prompts(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text('{"id": 1, "prompt": "The"}\n{"id": 2, "prompt": "A list"}\n')
    arguments = ("--checkpoint", folder, "--prompts", prompts, "--max-tokens", 4, "--output", output)
    assert run_main(main, *arguments) == 0
    assert output.read_text() == capsys.readouterr().out
    first, second = map(json.loads, output.read_text().splitlines())
    assert (first["id"], first["prompt"], second["id"]) == (1, "The", 2)
    assert first["text"].startswith("The") and second["text"].startswith("A list")


def test_the_command_prints_and_writes_the_text(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "sample.txt"
    arguments = ("--checkpoint", folder, "--prompt", "The", "--max-tokens", 8, "--seed", 3, "--output", output)
    assert run_main(main, *arguments) == 0
    printed = capsys.readouterr().out
    assert output.read_text() == printed
    assert printed.startswith("The")


def test_without_a_prompt_lines_are_continued_until_stop(folder: Path) -> None:  # noqa: F811
    result = subprocess.run(
        [sys.executable, "-m", "training.generate", "--checkpoint", folder, "--max-tokens", "3"],
        input="One\n" + "too long " * 20 + "\nTwo\nstop\nnever\n",
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert result.returncode == 0
    assert "prompt> One" in result.stdout and "prompt> Two" in result.stdout and "never" not in result.stdout
    assert "error: prompt 1: " in result.stderr and result.stderr.count("\n") == 1
    seeds = re.findall(r"^\(seed (\d+)\)$", result.stdout, re.MULTILINE)
    assert len(set(seeds)) == 2  # new seeds, which reproduce their texts
    text = result.stdout.partition("prompt> ")[2].partition("\n(seed")[0]
    (again,) = generate(load_model(folder)[0], Tokenizer(), ["One"], GenerateSettings(max_tokens=3, seed=int(seeds[0])))
    assert text == again


@pytest.mark.parametrize(("seed", "printed"), [((), True), (("--seed", 7), False)])
def test_typed_prompts_use_the_given_seed_or_new_ones(
    folder: Path,  # noqa: F811
    seed: tuple[object, ...],
    printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("The list\n" * 2))
    assert run_main(main, "--checkpoint", folder, "--max-tokens", 12, *seed) == 0
    first, second = capsys.readouterr().out.split("prompt> ")[1:3]
    assert ("(seed " in first) is printed
    assert (first == second) is not printed


def test_samples_differ_and_their_seeds_reproduce_them(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, tokenizer = load_model(folder)[0], Tokenizer()
    options = GenerateSettings(
        max_tokens=12, temperature=3, seed=2**64 - 2, top_k=0
    )  # the third seed wraps around to 0
    texts = list(generate(model, tokenizer, ["The", "A list"], options, samples=5))
    assert len(set(texts)) == 10 and [text[:3] for text in texts] == ["The"] * 5 + ["A l"] * 5
    for sample, seed in enumerate((2**64 - 2, 2**64 - 1, 0, 1, 2)):
        alone = options.model_copy(update={"seed": seed})
        assert list(generate(model, tokenizer, ["The", "A list"], alone)) == [texts[sample], texts[5 + sample]]
    (tmp_path / "prompts.txt").write_text("The\nA list\n")
    asked = ("--checkpoint", folder, "--max-tokens", 12, "--temperature", 3, "--top-k", 0, "--samples", 5)
    asked += ("--seed", 2**64 - 2)
    assert run_main(main, *asked, "--prompts", tmp_path / "prompts.txt") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == texts
    assert [(line["sample"], line["seed"]) for line in lines[4:6]] == [(5, 2), (1, 2**64 - 2)]
    assert run_main(main, *asked, "--prompt", "The", "--output", tmp_path / "out.txt") == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "out.txt").read_text() == printed
    assert printed == "".join(f"--- sample {n + 1}, seed {(2**64 - 2 + n) % 2**64}\n{texts[n]}\n" for n in range(5))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--top-p", "2"), "--top-p 2.0"),
        (("--temperature", "-1"), "--temperature -1.0"),
        (("--temperature", "nan"), "--temperature nan"),
        (("--seed", str(2**64)), "--seed 18446744073709551616"),
        (("--seed", "-1"), "--seed -1"),
        (("--max-tokens", "0"), "--max-tokens 0"),
        (("--samples", "0"), "--samples"),
        (
            ("--samples", "2", "--temperature", "0"),
            "--samples 2: with --temperature 0 all texts of a prompt are the same",
        ),
        ((), "no such folder"),
    ],
)
def test_wrong_options_give_one_line(
    tmp_path: Path, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert run_main(main, "--checkpoint", tmp_path / "absent", "--prompt", "x", *arguments) == 2
    except SystemExit as exited:  # raised by argparse
        assert exited.code == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
