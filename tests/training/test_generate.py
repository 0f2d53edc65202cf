"""Sampling obeys its options, the same seed gives the same text, and mistakes are one line."""

import io
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, GPT2LMHeadModel

from common.settings import GenerateSettings
from common.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.training.helpers import run_main
from tests.training.test_evaluate import folder, tiny_model  # noqa: F401  (a fixture)
from tests.training.test_model import SMALL, reference_model
from training.generate import choose, continue_tokens, generate, main, read_prompts
from training.huggingface.pretrained import from_hugging_face
from training.inference.load import load_model, model_from_weights
from training.model import GPT2

PROMPTS = [[], [7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(10, 30))]
LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))


@pytest.fixture(scope="module")
def models() -> tuple[GPT2, GPT2LMHeadModel]:
    """The same small random weights in our model and in that of transformers."""
    theirs = reference_model().eval()
    theirs.transformer.wpe.weight.data.mul_(6)  # places count as much as tokens: greedy text does not repeat itself
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    return model_from_weights(SMALL, from_hugging_face(weights, SMALL)), theirs


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


def test_among_equals_top_k_keeps_the_first() -> None:
    generator, options = torch.Generator().manual_seed(0), GenerateSettings(temperature=1, top_k=3)
    assert {choose(torch.tensor([0.0, 1, 0, 5, 1, 1]), options, generator) for _ in range(400)} == {1, 3, 4}


def test_top_k_may_be_more_than_the_vocabulary() -> None:
    assert set(draws(GenerateSettings(temperature=1, top_k=100), 400)) == {0, 1, 2, 3}


def test_top_p_keeps_the_likeliest_that_make_it_up_and_never_none() -> None:
    assert set(draws(GenerateSettings(temperature=1, top_k=0, top_p=0.7))) == {1, 3}
    assert set(draws(GenerateSettings(temperature=1, top_k=0, top_p=0.01))) == {1}


def test_a_seed_repeats_its_text_and_another_gives_another() -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    (one,) = generate(model, tokenizer, ["The list"], GenerateSettings(max_tokens=30, seed=1))
    assert one.startswith("The list")
    assert [one] == list(generate(model, tokenizer, ["The list"], GenerateSettings(max_tokens=30, seed=1)))
    assert [one] != list(generate(model, tokenizer, ["The list"], GenerateSettings(max_tokens=30, seed=2)))


def test_a_text_may_grow_past_the_context_and_stops_at_its_length() -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    (text,) = generate(model, tokenizer, [""], GenerateSettings(max_tokens=20, temperature=0))  # the context is 16
    (longer,) = generate(model, tokenizer, [""], GenerateSettings(max_tokens=25, temperature=0))
    assert longer.startswith(text) and len(longer) > len(text)


def test_a_text_ends_at_end_of_text() -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    model.head.vocab_bias[tokenizer.end_of_text] = torch.inf
    assert list(generate(model, tokenizer, ["Nothing"], GenerateSettings(temperature=0))) == ["Nothing"]


@pytest.mark.parametrize("temperature", [0, 2])
def test_texts_of_a_batch_are_those_that_each_prompt_has_alone(
    models: tuple[GPT2, GPT2LMHeadModel], temperature: float
) -> None:
    model, end = models[0], SMALL.vocab_size - 1
    options = GenerateSettings(max_tokens=30, temperature=temperature, top_k=0, seed=5)  # the context is 48
    alone = [continue_tokens(model, [prompt], options, end)[0] for prompt in PROMPTS]
    assert continue_tokens(model, PROMPTS, options, end) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)


def test_a_text_that_ends_leaves_the_others_of_its_batch_as_they_are(models: tuple[GPT2, GPT2LMHeadModel]) -> None:
    options, end = GenerateSettings(max_tokens=40, temperature=1, top_k=0, seed=3), 15  # drawn from 16: soon
    alone = [continue_tokens(models[0], [prompt], options, end)[0] for prompt in PROMPTS]
    assert len({len(tokens) for tokens in alone}) > 2
    assert continue_tokens(models[0], PROMPTS, options, end) == alone


def test_more_prompts_than_a_batch_keep_their_order() -> None:
    prompts = ["x", "The list of lists", *"abcdefgh", "1 2 3"]
    found = list(generate(tiny_model(50257), Tokenizer(), prompts, GenerateSettings(max_tokens=1, temperature=0)))
    assert len(found) == len(prompts)
    assert all(text.startswith(prompt) for text, prompt in zip(found, prompts, strict=True))


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_tokens_are_those_of_transformers(models: tuple[GPT2, GPT2LMHeadModel], prompt: list[int]) -> None:
    end, count = SMALL.vocab_size - 1, 40 - len(prompt)
    text = torch.tensor([[end, *prompt]])
    fixed = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=end, pad_token_id=end)
    expected = models[1].generate(text, attention_mask=torch.ones_like(text), generation_config=fixed)
    options = GenerateSettings(max_tokens=count, temperature=0)
    (found,) = continue_tokens(models[0], [prompt], options, end)
    assert found == [token for token in expected[0, text.shape[1] :].tolist() if token != end]
    assert len(set(found)) > 3


def test_prompts_are_lines_or_objects_of_lines(tmp_path: Path) -> None:
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
        ("long.txt", b"fine\n" + b"one two " * 10, "prompt 2: 21 tokens, the model has room for 15"),
    ],
)
def test_prompts_that_cannot_be_used_stop_in_one_line_and_write_nothing(
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
    assert len(set(seeds)) == 2  # fresh ones, and what they give can be had again
    text = result.stdout.partition("prompt> ")[2].partition("\n(seed")[0]
    (again,) = generate(load_model(folder)[0], Tokenizer(), ["One"], GenerateSettings(max_tokens=3, seed=int(seeds[0])))
    assert text == again


@pytest.mark.parametrize(("seed", "printed"), [((), True), (("--seed", 7), False)])
def test_typed_prompts_have_the_seed_that_is_given_or_fresh_ones(
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


def test_samples_are_different_texts_with_seeds_that_give_each_again(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, tokenizer = load_model(folder)[0], Tokenizer()
    options = GenerateSettings(
        max_tokens=12, temperature=3, seed=2**64 - 2, top_k=0
    )  # the third seed begins at 0 again
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


def test_the_lowest_temperature_is_greedy() -> None:
    assert set(draws(GenerateSettings(temperature=5e-324), 20)) == {1}


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
def test_wrong_options_stop_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert run_main(main, "--checkpoint", tmp_path / "absent", "--prompt", "x", *arguments) == 2
    except SystemExit as exited:  # the parser's own
        assert exited.code == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
