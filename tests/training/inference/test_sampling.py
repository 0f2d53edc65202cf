"""Sampling obeys its options, and the same seed gives the same text."""

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GPT2LMHeadModel

from common.settings import GenerateSettings
from common.tokenizer import Tokenizer
from tests.training.reference import tiny_model
from tests.training.test_model import SMALL, same_models
from training.inference.sampling import continue_tokens, generate, sample_token
from training.model import GPT2

PROMPTS = [[], [7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(10, 30))]
LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))


@pytest.fixture(scope="module")
def models() -> tuple[GPT2, GPT2LMHeadModel]:
    """The same small random weights in our model and in transformers', whose greedy text does not repeat itself."""
    return same_models(positions=6)


def draws(count: int = 400, logits: torch.Tensor = LOGITS, **options: Any) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    return Counter(sample_token(logits, GenerateSettings(**options), generator) for _ in range(count))


def test_tokens_are_drawn_by_their_probabilities() -> None:
    seen = draws(3000, temperature=1, top_k=0)
    assert [seen[token] / 3000 for token in range(4)] == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.03)
    sharp = draws(3000, temperature=0.5, top_k=0)
    assert sharp[1] / 3000 == pytest.approx(0.25 / (0.01 + 0.25 + 0.0225 + 0.0625), abs=0.03)


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({"temperature": 0}, {1}),
        ({"temperature": 1, "top_k": 2}, {1, 3}),
        ({"temperature": 1, "top_k": 100}, {0, 1, 2, 3}),
        ({"temperature": 1, "top_k": 0, "top_p": 0.74}, {1, 3}),
        ({"temperature": 1, "top_k": 0, "top_p": 0.76}, {1, 2, 3}),
        ({"temperature": 1, "top_k": 0, "top_p": 0.01}, {1}),
    ],
)
def test_only_the_most_likely_tokens_are_drawn(options: dict[str, Any], drawn: set[int]) -> None:
    assert set(draws(**options)) == drawn


def test_tokens_after_a_top_p_that_is_reached_exactly_are_not_drawn() -> None:
    assert set(draws(20, torch.zeros(2), temperature=1, top_k=0, top_p=0.5)) == {0}


def test_a_text_ends_at_end_of_text_and_prompts_keep_their_order_over_several_batches() -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    prompts = ["x", "The list of lists", *"abcdefgh", "1 2 3"]
    found = list(generate(model, tokenizer, prompts, GenerateSettings(max_tokens=1, temperature=0)))
    assert all(text.startswith(prompt) for text, prompt in zip(found, prompts, strict=True))
    end = torch.tensor([tokenizer.end_of_text])
    model.head.register_forward_hook(lambda _head, _inputs, logits: logits.index_fill(-1, end, torch.inf))
    assert list(generate(model, tokenizer, ["Nothing"], GenerateSettings(temperature=0))) == ["Nothing"]


@pytest.mark.parametrize(("temperature", "end"), [(2, SMALL.vocab_size - 1), (1, 15)])
def test_a_text_does_not_depend_on_the_rest_of_its_batch(
    models: tuple[GPT2, GPT2LMHeadModel], temperature: float, end: int
) -> None:
    """Nor on those that end before: with the end 15, one of 16 tokens, they do soon."""
    options = GenerateSettings(max_tokens=40, temperature=temperature, top_k=0, seed=3)  # the context is 48
    alone = [continue_tokens(models[0], [prompt], options, end)[0] for prompt in PROMPTS]
    assert continue_tokens(models[0], PROMPTS, options, end) == alone
    assert len({tuple(tokens) for tokens in alone} if end != 15 else {len(tokens) for tokens in alone}) > 2


@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_tokens_equal_those_of_transformers(
    models: tuple[GPT2, GPT2LMHeadModel], prompt: list[int], penalty: float
) -> None:
    end, count = SMALL.vocab_size - 1, 40 - len(prompt)
    text = torch.tensor([prompt or [end]])
    fixed = GenerationConfig(
        max_new_tokens=count, do_sample=False, eos_token_id=end, pad_token_id=end, repetition_penalty=penalty
    )
    expected = models[1].generate(text, attention_mask=torch.ones_like(text), generation_config=fixed)
    options = GenerateSettings(max_tokens=count, temperature=0, repetition_penalty=penalty)
    (found,) = continue_tokens(models[0], [prompt], options, end)
    assert found == [token for token in expected[0, text.shape[1] :].tolist() if token != end]
    assert len(set(found)) > 3
