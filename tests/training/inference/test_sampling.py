"""Sampling obeys its options, and the same seed gives the same text."""

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GPT2LMHeadModel

from common.settings import GenerateSettings
from common.tokenizer import Tokenizer
from tests.training.reference import tiny_model
from tests.training.test_model import SMALL, same_models
from training.inference.sampling import continue_tokens, decided_bytes, generate, sample_token
from training.model import GPT2

PROMPTS = [[], [7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(10, 30))]
LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
FIVE_DEVIATIONS = 5 * (0.5 * 0.5 / 3000) ** 0.5  # of a share of 3000 draws: the draws differ between processors


@pytest.fixture(scope="module")
def models() -> tuple[GPT2, GPT2LMHeadModel]:
    """The same small random weights in our model and in transformers'; greedy texts do not loop."""
    return same_models(positions=6)


def draws(count: int = 400, logits: torch.Tensor = LOGITS, **options: Any) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    return Counter(sample_token(logits, GenerateSettings(**options), generator) for _ in range(count))


def test_tokens_are_drawn_by_their_probabilities() -> None:
    seen = draws(3000, temperature=1, top_k=0)
    assert [seen[token] / 3000 for token in range(4)] == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=FIVE_DEVIATIONS)
    sharp = draws(3000, temperature=0.5, top_k=0)
    assert sharp[1] / 3000 == pytest.approx(0.25 / (0.01 + 0.25 + 0.0225 + 0.0625), abs=FIVE_DEVIATIONS)
    assert set(draws(20, torch.zeros(2), temperature=1, top_k=0, top_p=0.5)) == {0}, "top_p is reached exactly"


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
    ends = {"end_of_text": end, "vocab_size": end + 1}
    alone = [continue_tokens(models[0], [prompt], options, **ends)[0] for prompt in PROMPTS]
    assert continue_tokens(models[0], PROMPTS, options, **ends) == alone
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


def scripted(text: bytes, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every model write `text`, one byte per token, after any prompt."""
    script = [tokenizer.vocabulary.tokens.index(bytes([byte])) for byte in text]

    def next_logits(texts: Mapping[int, list[int]]) -> torch.Tensor:
        step.append(len(texts))
        token = torch.tensor([script[len(step) - 1]] * len(texts))
        return torch.nn.functional.one_hot(token, 50257).float()

    step: list[int] = []
    monkeypatch.setattr("training.inference.sampling.kv_cache", lambda *sizes: nullcontext(next_logits))


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ([], "one two\nthr\u00e9\u00e9 \U0001f600 four\n"),
        (["\n"], "one two"),
        (["two\nt"], "one "),
        (["twin", "four", "three"], "one two\nthr\u00e9\u00e9 \U0001f600 "),
        (["\u00e9 "], "one two\nthr\u00e9"),
        (["P: one"], "one two\nthr\u00e9\u00e9 \U0001f600 four\n"),
        (["one"], ""),
    ],
    ids=str,
)
def test_a_text_ends_before_a_stop_string_and_shows_only_whole_characters_that_stay(
    stop: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte is a token, so stop strings and characters cross the borders of tokens."""
    tokenizer, shown = Tokenizer(), [""]
    whole = "one two\nthr\u00e9\u00e9 \U0001f600 four\n".encode()
    scripted(whole, tokenizer, monkeypatch)
    options = GenerateSettings(temperature=0, stop=stop, max_tokens=len(whole))
    found = list(generate(tiny_model(50257), tokenizer, ["P: "], options, show=shown.append))
    assert found == ["P: " + text]
    assert all(found[0].startswith(each) for each in shown) and shown == sorted(shown, key=len)
    assert len(set(shown)) > len(text) / 2  # it grows, not all at once
    if not stop:
        assert shown[-1] == found[0] and len(set(shown)) == len(text) + 1


def test_only_bytes_that_no_stop_string_can_take_away_are_decided() -> None:
    assert decided_bytes(b"ab", [b"bcd", b"abc"]) == (0, False)
    assert decided_bytes(b"xbc", [b"bcd", b"cx"]) == (1, False)
    assert decided_bytes(b"xbcx", [b"bcd", b"cx"]) == (2, True)
    assert decided_bytes(b"one one", [b"one"]) == (0, True)


def test_texts_that_end_leave_the_batch(models: tuple[GPT2, GPT2LMHeadModel]) -> None:
    """Nothing is computed for them, and the others keep the text that they have alone."""
    sizes: list[int] = []
    hook = models[0].head.register_forward_hook(lambda _head, inputs, _logits: sizes.append(len(inputs[0])))
    options = GenerateSettings(max_tokens=12, temperature=1, top_k=0, seed=3)
    limits, counts = [3, 12, 1, 7], Counter[int]()

    def goes_on(row: int, token: int) -> bool:
        counts[row] += 1
        return counts[row] < limits[row]

    end = SMALL.vocab_size - 1
    found = continue_tokens(models[0], PROMPTS, options, end, goes_on=goes_on)
    hook.remove()
    assert sizes == [sum(limit > step for limit in limits) for step in range(12)]
    alone = [continue_tokens(models[0], [prompt], options, end)[0] for prompt in PROMPTS]
    assert found == [tokens[:limit] for tokens, limit in zip(alone, limits, strict=True)]
