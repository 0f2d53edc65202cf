"""The command continues prompts from options and files."""

import io
import json
from pathlib import Path

import pytest

from common.settings import GenerateSettings
from common.tokenizer import Tokenizer
from tests.convert.helpers import write_pretrained
from tests.helpers import run_main
from tests.training.helpers import Capsys, Patch, refusal
from tests.training.reference import tiny_model
from training.generate import main
from training.inference.sampling import generate


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny model, whose texts at temperature 3 are random tokens."""
    folder, model = tmp_path_factory.mktemp("model"), tiny_model(50257)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_pretrained(folder, weights, model.settings, Tokenizer())
    return folder


def random_texts(checkpoint: Path, *more: object) -> list[object]:
    return ["--checkpoint", checkpoint, "--max-tokens", 9, "--temperature", 3, "--top-k", 0, "--seed", 5, *more]


def test_samples_differ_and_their_seeds_reproduce_them(checkpoint: Path, tmp_path: Path, capsys: Capsys) -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    seeds = [2**64 - 1, 0, 1]  # the second one wraps around
    options = GenerateSettings(max_tokens=6, temperature=3, seed=seeds[0], top_k=0)
    texts = list(generate(model, tokenizer, ["The", "A list"], options, samples=3))
    assert len(set(texts)) == 6 and [text[:3] for text in texts] == ["The"] * 3 + ["A l"] * 3
    for sample, seed in enumerate(seeds):
        alone = options.model_copy(update={"seed": seed})
        assert list(generate(model, tokenizer, ["The", "A list"], alone)) == [texts[sample], texts[3 + sample]]
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "prompt": "The"}\n{"id": 2, "prompt": "A list"}\n')
    asked = random_texts(checkpoint, "--max-tokens", 6, "--samples", 3, "--seed", seeds[0])
    assert run_main(main, *asked, "--prompts", tmp_path / "prompts.jsonl") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == texts
    assert [(line["id"], line["sample"], line["seed"]) for line in lines[2:4]] == [(1, 3, 1), (2, 1, seeds[0])]
    assert run_main(main, *asked, "--prompt", "The", "--output", tmp_path / "out.txt") == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "out.txt").read_text() == printed
    assert printed == "".join(f"--- sample {n + 1}, seed {seeds[n]}\n{texts[n]}\n" for n in range(3))


class Terminal(io.StringIO):
    """Standard output that remembers each piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


@pytest.mark.parametrize("samples", [1, 9])  # more than a batch
def test_a_terminal_shows_the_same_text_as_a_pipe_as_it_is_generated(
    checkpoint: Path, tmp_path: Path, samples: int, capsys: Capsys, monkeypatch: Patch
) -> None:
    asked = random_texts(checkpoint, "--samples", samples)
    assert run_main(main, *asked, "--prompt", "The \u00e9") == 0
    piped, terminal = capsys.readouterr().out, Terminal()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", terminal)
        assert run_main(main, *asked, "--prompt", "The \u00e9", "--output", tmp_path / "out.txt") == 0
    assert terminal.getvalue() == (tmp_path / "out.txt").read_text() == piped
    assert len([piece for piece in terminal.pieces if piece.strip()]) > 5
    typed = Terminal()
    monkeypatch.setattr("sys.stdin", io.StringIO("The \u00e9\n" + "long " * 20 + "\nstop\n"))
    monkeypatch.setattr("sys.stdout", typed)
    assert run_main(main, *asked) == 0
    assert typed.getvalue() == f"prompt> {piped}prompt> prompt> " and len(typed.pieces) > 5


def test_json_is_a_line_per_text_and_stop_ends_each(checkpoint: Path, tmp_path: Path, capsys: Capsys) -> None:
    options = GenerateSettings(max_tokens=9, temperature=3, top_k=0, seed=5)
    (text,) = generate(tiny_model(50257), Tokenizer(), ["The"], options)
    stop = text[10:14]
    asked = random_texts(checkpoint, "--prompt", "The", "--stop", "none of it", "--stop", stop, "--json")
    assert run_main(main, *asked, "--output", tmp_path / "out.jsonl") == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"prompt": "The", "text": text[: text.index(stop, 3)]}
    assert (tmp_path / "out.jsonl").read_text() == printed
    assert run_main(main, *asked, "--samples", 2) == 0
    assert [json.loads(line)["seed"] for line in capsys.readouterr().out.splitlines()] == [5, 6]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--stop", "", "--prompt", "x"], "--stop"),
        (["--json"], "--json needs --prompt"),
        (["--prompts", "none.txt"], "none.txt: no such file"),
        (["--prompts", "prompts.jsonl"], "prompts.jsonl:2: no string under 'prompt'"),
    ],
)
def test_wrong_options_and_prompts_are_a_line_before_the_model_is_loaded(
    options: list[str], problem: str, tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The"}\n{"text": "The"}\n')
    assert problem in refusal(capsys, main, "--checkpoint", tmp_path, *options)
