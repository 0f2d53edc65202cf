"""Logits with a cache equal those of the full text, and the model is restored afterwards."""

import pytest
import torch

from tests.numerics import assert_close, logit_terms
from tests.training.reference import tiny_model
from training.inference.kv_cache import kv_cache
from training.model import GPT2

VOCABULARY = 97
CONTEXT = 16


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def whole(model: GPT2, text: list[int]) -> torch.Tensor:
    """The expected logits: a pass over the last window of the text."""
    with torch.no_grad():
        return model(torch.tensor([text[-CONTEXT:]]))[0, -1]


@pytest.mark.parametrize("lengths", [(1,), (1, 9, 4), (3, 14, 16)], ids=str)
def test_logits_equal_those_of_the_full_texts_when_the_window_slides_and_texts_end(lengths: tuple[int, ...]) -> None:
    model, batch = tiny_model(VOCABULARY), texts(*lengths)
    found, asked = [], []
    grown = {row: list(text) for row, text in enumerate(batch)}
    with kv_cache(model, len(batch), max(lengths) + 18) as next_logits:
        assert hasattr(model.wte.weight, "packed") == (len(batch) > 2)
        for step in range(18):
            found.append(next_logits(grown).clone())
            asked += [list(text) for text in grown.values()]
            if step in (3, 9) and len(grown) > 1:
                del grown[2 if step == 3 else 0]
            for row, text in grown.items():
                text.append((7 * step + 3 * row) % VOCABULARY)
    assert not hasattr(model.wte.weight, "packed")
    expected = torch.stack([whole(model, text) for text in asked])
    assert_close(torch.cat(found), expected, terms=logit_terms(model.settings))
