"""The command continues prompts from options, files and the terminal, and reports mistakes in one line."""

import io
import json
import re
import sys
from pathlib import Path

import pytest

from common.settings import GenerateSettings
from common.tokenizer import Tokenizer
from tests.training.helpers import Capsys, Patch, refusal, run_main
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
    ("name", "content", "names"),
    [
        ("empty.txt", b"", "empty.txt: no prompts"),
        ("bytes.txt", b"fine\n\xff\n", "bytes.txt:2: "),
        ("torn.jsonl", b'{"prompt": "x"}\n{"prompt', "torn.jsonl:2: "),
        ("key.jsonl", b'{"text": "x"}', "key.jsonl:1: "),
        ("list.jsonl", b"[1]", "list.jsonl:1: "),
        ("long.txt", b"fine\n" + b"one two " * 10, "prompt 2: 21 tokens, the model has room for 16"),
    ],
)
def test_unusable_prompts_give_one_line_and_write_nothing(
    gpt2_folder: Path, tmp_path: Path, name: str, content: bytes, names: str, capsys: Capsys
) -> None:
    (tmp_path / name).write_bytes(content)
    output = tmp_path / "out.jsonl"
    words = ("--checkpoint", gpt2_folder, "--prompts", tmp_path / name, "--output", output)
    assert names in refusal(capsys, main, *words)
    assert not output.exists()


def test_without_a_prompt_lines_are_continued_until_stop(gpt2_folder: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("One\n" + "too long " * 20 + "\nTwo\nstop\nnever\n"))
    assert run_main(main, "--checkpoint", gpt2_folder, "--max-tokens", 3) == 0
    out, error = capsys.readouterr()
    assert out.count("prompt> ") == 4
    assert "error: prompt 1: " in error and error.count("\n") == 1
    seeds = re.findall(r"^\(seed (\d+)\)$", out, re.MULTILINE)
    assert len(set(seeds)) == 2  # new seeds, which reproduce their texts
    options = GenerateSettings(max_tokens=3, seed=int(seeds[0]))
    (again,) = generate(load_model(gpt2_folder)[0], Tokenizer(), ["One"], options)
    assert out.startswith(f"prompt> {again}\n(seed")
    monkeypatch.setattr(sys, "stdin", io.StringIO("The list\n" * 2))
    assert run_main(main, "--checkpoint", gpt2_folder, "--max-tokens", 12, "--seed", 7) == 0
    first, second = capsys.readouterr().out.split("prompt> ")[1:3]
    assert first == second and "(seed " not in first


def test_samples_differ_and_their_seeds_reproduce_them(gpt2_folder: Path, tmp_path: Path, capsys: Capsys) -> None:
    model, tokenizer = load_model(gpt2_folder)[0], Tokenizer()
    seeds = [2**64 - 1, 0, 1]  # the second one wraps around
    options = GenerateSettings(max_tokens=6, temperature=3, seed=seeds[0], top_k=0)
    texts = list(generate(model, tokenizer, ["The", "A list"], options, samples=3))
    assert len(set(texts)) == 6 and [text[:3] for text in texts] == ["The"] * 3 + ["A l"] * 3
    for sample, seed in enumerate(seeds):
        alone = options.model_copy(update={"seed": seed})
        assert list(generate(model, tokenizer, ["The", "A list"], alone)) == [texts[sample], texts[3 + sample]]
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "prompt": "The"}\n{"id": 2, "prompt": "A list"}\n')
    asked = ("--checkpoint", gpt2_folder, "--max-tokens", 6, "--temperature", 3, "--top-k", 0, "--samples", 3)
    asked += ("--seed", seeds[0])
    assert run_main(main, *asked, "--prompts", tmp_path / "prompts.jsonl") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == texts
    assert [(line["id"], line["sample"], line["seed"]) for line in lines[2:4]] == [(1, 3, 1), (2, 1, seeds[0])]
    assert run_main(main, *asked, "--prompt", "The", "--output", tmp_path / "out.txt") == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "out.txt").read_text() == printed
    assert printed == "".join(f"--- sample {n + 1}, seed {seeds[n]}\n{texts[n]}\n" for n in range(3))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--top-p", "2"), "--top-p"),
        (("--temperature", "-1"), "--temperature"),
        (("--temperature", "nan"), "--temperature"),
        (("--seed", str(2**64)), "--seed 18446744073709551616"),
        (("--seed", "-1"), "--seed"),
        (("--max-tokens", "0"), "--max-tokens"),
        (("--samples", "0"), "--samples"),
        (("--samples", "2", "--temperature", "0"), "--samples 2"),
        ((), "no such folder"),
    ],
)
def test_wrong_options_give_one_line(tmp_path: Path, arguments: tuple[str, ...], names: str, capsys: Capsys) -> None:
    assert names in refusal(capsys, main, "--checkpoint", tmp_path / "absent", "--prompt", "x", *arguments)
