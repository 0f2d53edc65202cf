"""Sampling obeys its options, the same seed gives the same text, and mistakes are one line."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from common.settings import GenerateSettings
from common.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.training.helpers import run_main
from tests.training.test_evaluate import folder, tiny_model  # noqa: F401  (a fixture)
from training.generate import choose, generate, main

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))


def draws(options: GenerateSettings, count: int = 8000) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    return Counter(choose(LOGITS, options, generator) for _ in range(count))


def test_temperature_zero_is_greedy() -> None:
    assert set(draws(GenerateSettings(temperature=0), 20)) == {1}


def test_tokens_are_drawn_by_their_probabilities() -> None:
    seen = draws(GenerateSettings(temperature=1, top_k=0))
    assert [seen[token] / 8000 for token in range(4)] == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.03)
    sharp = draws(GenerateSettings(temperature=0.5, top_k=0))
    assert sharp[1] / 8000 == pytest.approx(0.25 / (0.01 + 0.25 + 0.0225 + 0.0625), abs=0.03)


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draws(GenerateSettings(temperature=1, top_k=2))) == {1, 3}


def test_top_p_keeps_the_likeliest_that_make_it_up_and_never_none() -> None:
    assert set(draws(GenerateSettings(temperature=1, top_k=0, top_p=0.7))) == {1, 3}
    assert set(draws(GenerateSettings(temperature=1, top_k=0, top_p=0.01))) == {1}


def test_a_seed_repeats_its_text_and_another_gives_another() -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    one = generate(model, tokenizer, "The list", GenerateSettings(max_tokens=30, seed=1))
    assert one.startswith("The list")
    assert one == generate(model, tokenizer, "The list", GenerateSettings(max_tokens=30, seed=1))
    assert one != generate(model, tokenizer, "The list", GenerateSettings(max_tokens=30, seed=2))


def test_a_text_may_grow_past_the_context_and_stops_at_its_length() -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    text = generate(model, tokenizer, "", GenerateSettings(max_tokens=20, temperature=0))  # the context is 16
    longer = generate(model, tokenizer, "", GenerateSettings(max_tokens=25, temperature=0))
    assert longer.startswith(text) and len(longer) > len(text)


def test_a_text_ends_at_end_of_text() -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    model.head.vocab_bias[tokenizer.end_of_text] = torch.inf
    assert generate(model, tokenizer, "Nothing", GenerateSettings(temperature=0)) == "Nothing"


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
        input="One\nTwo\nstop\nnever\n",
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert result.returncode == 0
    assert "prompt> One" in result.stdout and "prompt> Two" in result.stdout and "never" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("--top-p", "2"), "--top-p 2.0"), (("--temperature", "-1"), "--temperature -1.0"), ((), "no such folder")],
)
def test_wrong_options_stop_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(main, "--checkpoint", tmp_path / "absent", "--prompt", "x", *arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
