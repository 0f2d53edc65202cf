"""Which layers a stage holds, and how long the pipeline idles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.settings import ModelSettings
from training.loss import LossHead
from training.model import GPT2
from training.parallel.pipeline import Stage
from training.parallel.stages import bubble_share, stage_layers


@given(st.integers(1, 60), st.integers(1, 12))
def test_layers_are_spread_evenly_and_in_order(n_layer: int, stages: int) -> None:
    layers = stage_layers(n_layer, stages)
    assert [layer for stage in layers for layer in stage] == list(range(n_layer))
    sizes = [len(stage) for stage in layers]
    assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)


def test_the_bubble_is_as_in_the_papers() -> None:
    assert [bubble_share(*sizes) for sizes in ((1, 1, 8), (4, 1, 8), (4, 2, 8))] == pytest.approx([0, 3 / 11, 3 / 19])


def test_stages_in_sequence_equal_the_model() -> None:
    settings = ModelSettings(n_layer=3, n_head=2, n_embd=8, seq_len=6, vocab_size=20)
    torch.manual_seed(0)
    whole = GPT2(settings).eval()
    whole.head = LossHead(settings.vocab_size)
    stages = []
    for number, layers in enumerate(stage_layers(3, 3)):
        model = GPT2(settings)
        model.head = LossHead(settings.vocab_size)
        model.load_state_dict(whole.state_dict())
        stages.append(Stage(model, layers, number == 0, number == 2).eval())
    held = [["h", "wpe", "wte"], ["h"], ["h", "head", "ln_f", "wte"]]
    assert [sorted(dict(stage.model.named_children())) for stage in stages] == held
    assert [list(stage.model.h) for stage in stages] == [["0"], ["1"], ["2"]]
    tokens, targets = torch.randint(20, (2, 2, 6)).unbind()
    x = tokens
    for stage in stages:
        x = stage(x, targets=targets)
    alone = Stage(whole, range(3))
    assert torch.equal(x, alone(tokens, targets=targets)) and x.shape == (1,)
