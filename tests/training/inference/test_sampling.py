"""Sampling obeys its options, and the same seed gives the same text."""

from collections import Counter

import pytest
import torch
from transformers import GenerationConfig, GPT2LMHeadModel

from common.settings import GenerateSettings
from common.tokenizer import Tokenizer
from tests.training.test_evaluate import tiny_model
from tests.training.test_model import SMALL, reference_model
from training.huggingface.pretrained import from_hugging_face
from training.inference.load import model_from_weights
from training.inference.sampling import continue_tokens, generate, sample_token
from training.model import GPT2

PROMPTS = [[], [7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(10, 30))]
LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))


@pytest.fixture(scope="module")
def models() -> tuple[GPT2, GPT2LMHeadModel]:
    """The same small random weights in our model and in transformers'."""
    theirs = reference_model().eval()
    theirs.transformer.wpe.weight.data.mul_(6)  # so that greedy text does not repeat itself
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    return model_from_weights(SMALL, from_hugging_face(weights, SMALL)), theirs


def draws(options: GenerateSettings, count: int = 8000) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    return Counter(sample_token(LOGITS, options, generator) for _ in range(count))


def test_temperature_zero_is_greedy() -> None:
    assert set(draws(GenerateSettings(temperature=0), 20)) == {1}


def test_tokens_are_drawn_by_their_probabilities() -> None:
    seen = draws(GenerateSettings(temperature=1, top_k=0))
    assert [seen[token] / 8000 for token in range(4)] == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.03)
    sharp = draws(GenerateSettings(temperature=0.5, top_k=0))
    assert sharp[1] / 8000 == pytest.approx(0.25 / (0.01 + 0.25 + 0.0225 + 0.0625), abs=0.03)


def test_top_k_keeps_the_k_most_likely() -> None:
    assert set(draws(GenerateSettings(temperature=1, top_k=2))) == {1, 3}


def test_among_ties_top_k_keeps_the_first() -> None:
    generator, options = torch.Generator().manual_seed(0), GenerateSettings(temperature=1, top_k=3)
    assert {sample_token(torch.tensor([0.0, 1, 0, 5, 1, 1]), options, generator) for _ in range(400)} == {1, 3, 4}


def test_top_k_may_exceed_the_vocabulary() -> None:
    assert set(draws(GenerateSettings(temperature=1, top_k=100), 400)) == {0, 1, 2, 3}


def test_top_p_keeps_the_most_likely_and_at_least_one() -> None:
    assert set(draws(GenerateSettings(temperature=1, top_k=0, top_p=0.7))) == {1, 3}
    assert set(draws(GenerateSettings(temperature=1, top_k=0, top_p=0.01))) == {1}


def test_a_seed_reproduces_its_text_and_another_seed_changes_it() -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    (one,) = generate(model, tokenizer, ["The list"], GenerateSettings(max_tokens=30, seed=1))
    assert one.startswith("The list")
    assert [one] == list(generate(model, tokenizer, ["The list"], GenerateSettings(max_tokens=30, seed=1)))
    assert [one] != list(generate(model, tokenizer, ["The list"], GenerateSettings(max_tokens=30, seed=2)))


def test_a_text_may_exceed_the_context_and_stops_at_max_tokens() -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    (text,) = generate(model, tokenizer, [""], GenerateSettings(max_tokens=20, temperature=0))  # the context is 16
    (longer,) = generate(model, tokenizer, [""], GenerateSettings(max_tokens=25, temperature=0))
    assert longer.startswith(text) and len(longer) > len(text)


def test_a_text_ends_at_end_of_text() -> None:
    model, tokenizer = tiny_model(50257), Tokenizer()
    end = torch.tensor([tokenizer.end_of_text])
    model.head.register_forward_hook(lambda _head, _inputs, logits: logits.index_fill(-1, end, torch.inf))
    assert list(generate(model, tokenizer, ["Nothing"], GenerateSettings(temperature=0))) == ["Nothing"]


@pytest.mark.parametrize("temperature", [0, 2])
def test_a_text_does_not_depend_on_the_rest_of_its_batch(
    models: tuple[GPT2, GPT2LMHeadModel], temperature: float
) -> None:
    model, end = models[0], SMALL.vocab_size - 1
    options = GenerateSettings(max_tokens=30, temperature=temperature, top_k=0, seed=5)  # the context is 48
    alone = [continue_tokens(model, [prompt], options, end)[0] for prompt in PROMPTS]
    assert continue_tokens(model, PROMPTS, options, end) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)


def test_a_text_that_ends_does_not_affect_the_rest_of_its_batch(models: tuple[GPT2, GPT2LMHeadModel]) -> None:
    options, end = (
        GenerateSettings(max_tokens=40, temperature=1, top_k=0, seed=3),
        15,
    )  # one of 16: drawn soon
    alone = [continue_tokens(models[0], [prompt], options, end)[0] for prompt in PROMPTS]
    assert len({len(tokens) for tokens in alone}) > 2
    assert continue_tokens(models[0], PROMPTS, options, end) == alone


def test_prompts_keep_their_order_over_several_batches() -> None:
    prompts = ["x", "The list of lists", *"abcdefgh", "1 2 3"]
    found = list(generate(tiny_model(50257), Tokenizer(), prompts, GenerateSettings(max_tokens=1, temperature=0)))
    assert len(found) == len(prompts)
    assert all(text.startswith(prompt) for text, prompt in zip(found, prompts, strict=True))


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


def test_the_lowest_temperature_is_greedy() -> None:
    assert set(draws(GenerateSettings(temperature=5e-324), 20)) == {1}
