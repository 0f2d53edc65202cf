"""The predicted time of a step: its formulas, and the bytes that are sent."""

from dataclasses import replace

import numpy as np
import pytest

from common.settings import ModelSettings
from training.parallel.sizes import bubble_share
from training.planning.layout import Layout, Workload, by_part
from training.planning.machines import machine
from training.planning.memory import held
from training.planning.search import Prediction
from training.planning.speed import PRODUCTS, flops_per_token, speed_terms, within_documents

GPT2_345M = Workload(ModelSettings(n_layer=24, n_head=16, n_embd=1024), "bfloat16", compiled=True)
H100S = machine("h100", {})


def test_the_bubble_is_that_of_its_formula_where_ranks_are_equal() -> None:
    deep = Workload(ModelSettings(n_layer=64, n_head=16, n_embd=4096, vocab_size=128), "bfloat16", compiled=True)
    layout = Layout(pipeline=8, virtual_stages=2, schedule="interleaved_1f1b", accumulation=16, micro_batch_size=4)
    terms = by_part(speed_terms(deep, layout, H100S))
    outside = ("optimizer", "overhead", "data-parallel communication")
    pipelined = sum(value for name, value in terms.items() if name not in outside)
    assert terms["pipeline bubble"] / pipelined == pytest.approx(bubble_share(8, 2, 16), rel=0.03)


@pytest.mark.parametrize("mean", [20, 600])
def test_attention_within_documents_is_counted_by_their_lengths(mean: int) -> None:
    lengths = np.random.default_rng(1).geometric(1 / mean, size=20_000)
    ends = np.repeat(np.cumsum(lengths), lengths)
    place = np.arange(len(ends))
    seen = np.minimum(place - (ends - np.repeat(lengths, lengths)), place % 256) + 1
    share = within_documents(lengths, 256)
    assert share == pytest.approx(seen.mean() / (257 / 2), rel=0.01)
    apart = replace(GPT2_345M, attention=share)
    times = [by_part(speed_terms(one, Layout(micro_batch_size=64), H100S))["attention"] for one in (apart, GPT2_345M)]
    assert times[0] / times[1] == pytest.approx(share, rel=0.05)
    model = GPT2_345M.model
    full, less = flops_per_token(model), flops_per_token(model, share)
    assert full - less == pytest.approx((1 - share) * 12 * 24 * 1024 * 1024)


def test_muon_has_one_moment_per_matrix_and_takes_the_time_of_newton_schulz() -> None:
    muon, layout = replace(GPT2_345M, optimizer="muon"), Layout(data=8, zero_stage=1)
    found = {term.name: term.value for term in speed_terms(muon, layout, H100S) if term.part == "optimizer"}
    flops = 5 * 24 * (6 * 1024**3 * 4 + 18 * 1024**3 * 2)
    assert found["Newton-Schulz"] == pytest.approx(flops / 8 / (PRODUCTS * H100S.peak_flops("bfloat16")))
    moments = [held(GPT2_345M.model, Layout(), 0).moments(name) for name in ("adamw", "muon")]
    assert moments[0] - moments[1] == 24 * 12 * 1024**2


def links(layout: Layout) -> tuple[float, float]:
    return Prediction(GPT2_345M, layout, H100S).links


def test_ring_bytes_are_counted_by_the_link_that_they_take() -> None:
    layers = 12 * 1024**2 + 13 * 1024
    held = 24 * layers + (50304 + 1024 + 2) * 1024
    assert links(Layout(data=8)) == (pytest.approx(2 * 7 / 8 * 4 * held), 0)
    assert links(Layout(data=16, zero_stage=1)) == (0, pytest.approx(15 / 16 * (2 + 4) * held))
    inside, between = links(Layout(tensor=8, data=2, micro_batch_size=4, accumulation=2))
    assert inside == pytest.approx(2 * 4 * 24 * 2 * 7 / 8 * 2 * 4 * 1024 * 1024)
    assert between == pytest.approx(4 * (24 * layers + 51200 * 1024) / 8, rel=0.05)
    assert links(Layout(pipeline=2, accumulation=8)) == (pytest.approx(2 * 8 * 2 * 1024 * 1024), 0)
