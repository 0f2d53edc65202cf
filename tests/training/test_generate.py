"""The command continues prompts from options and files."""

import json
from pathlib import Path

from common.settings import GenerateSettings
from common.tokenizer import Tokenizer
from tests.conftest import Command
from tests.convert.helpers import write_pretrained
from tests.helpers import assert_one_line_error, run_main
from tests.training.helpers import Capsys
from tests.training.reference import tiny_model
from training.generate import main
from training.inference.sampling import generate


def test_samples_differ_and_their_seeds_reproduce_them(tmp_path: Path, capsys: Capsys) -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_pretrained(tmp_path, weights, model.settings, tokenizer)
    seeds = [2**64 - 1, 0, 1]  # the second one wraps around
    options = GenerateSettings(max_tokens=6, temperature=3, seed=seeds[0], top_k=0)
    texts = list(generate(model, tokenizer, ["The", "A list"], options, samples=3))
    assert len(set(texts)) == 6 and [text[:3] for text in texts] == ["The"] * 3 + ["A l"] * 3
    for sample, seed in enumerate(seeds):
        alone = options.model_copy(update={"seed": seed})
        assert list(generate(model, tokenizer, ["The", "A list"], alone)) == [texts[sample], texts[3 + sample]]
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "prompt": "The"}\n{"id": 2, "prompt": "A list"}\n')
    asked = ("--checkpoint", tmp_path, "--max-tokens", 6, "--temperature", 3, "--top-k", 0, "--samples", 3)
    asked += ("--seed", seeds[0])
    assert run_main(main, *asked, "--prompts", tmp_path / "prompts.jsonl") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == texts
    assert [(line["id"], line["sample"], line["seed"]) for line in lines[2:4]] == [(1, 3, 1), (2, 1, seeds[0])]
    assert run_main(main, *asked, "--prompt", "The", "--output", tmp_path / "out.txt") == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "out.txt").read_text() == printed
    assert printed == "".join(f"--- sample {n + 1}, seed {seeds[n]}\n{texts[n]}\n" for n in range(3))


def test_prompts_of_a_file_are_read_when_the_module_is_run(command: Command, tmp_path: Path) -> None:
    result = command("training.generate", "--checkpoint", tmp_path, "--prompts", tmp_path / "none.txt")
    assert_one_line_error(result, "none.txt: no such file")
