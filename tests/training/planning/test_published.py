"""The published estimates, and how far ours are from them."""

import pytest

from common.settings import ModelSettings
from tests.training.planning.test_memory import GPU
from training.planning import published
from training.planning.activations import layer_bytes, loss_bytes
from training.planning.layout import Layout
from training.planning.moments import in_flight
from training.planning.workload import Workload

S, B, H, A, V = 1024, 4, 1024, 16, 50304
MODEL = ModelSettings(n_layer=24, n_head=A, n_embd=H, seq_len=S, vocab_size=V)
WORKLOAD = Workload(MODEL, "bfloat16", compiled=True)
SMALL = 16 * S * B + 4 * A * S * B  # LayerNorm's statistics and attention's log-sum-exp, which the papers leave out


def saved(layout: Layout, workload: Workload = WORKLOAD) -> float:
    return layer_bytes(workload, layout._replace(micro_batch_size=B), GPU).saved


def test_a_layer_keeps_34_bytes_per_token_and_channel_and_its_share_on_a_tensor_parallel_rank() -> None:
    assert published.layer_activations(S, B, H, A) == S * B * H * (34 + 5 * A * S / H)
    assert published.flash_layer_activations(S, B, H) == 34 * S * B * H
    assert saved(Layout()) == 34 * S * B * H + SMALL
    assert saved(Layout(tensor=4)) == pytest.approx(published.flash_layer_activations(S, B, H, 4), rel=0.01)
    theirs = published.flash_layer_activations(S, B, H, 4, sequence_parallel=True)
    inputs = 4 * S * B * H * (1 - 1 / 4)  # of split products, which ours keep whole
    assert saved(Layout(tensor=4, sequence_parallel=True)) == pytest.approx(theirs + inputs, rel=0.01)
    dry = Workload(MODEL.model_copy(update={"dropout": 0.0}), "bfloat16", compiled=True)
    assert saved(Layout()) - saved(Layout(), dry) == 2 * S * B * H  # two masks of a byte
    assert saved(Layout(recompute="full")) == published.full_recompute_activations(S, B, H) == 2 * S * B * H


def test_ours_keep_logits_in_two_bytes_where_the_paper_counts_four() -> None:
    layout = Layout(micro_batch_size=B)
    loss = loss_bytes(WORKLOAD, layout, GPU, layer_bytes(WORKLOAD, layout, GPU))
    cast = 2 * V * H  # of the head's weight, which the paper's mixed precision has in any case
    assert loss.saved - cast + loss.logits == published.head_activations(S, B, H, V) - 2 * S * B * V


def test_pipelines_keep_the_published_number_of_micro_batches() -> None:
    pipeline = Layout(pipeline=4, accumulation=16)
    assert [in_flight(pipeline, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(pipeline._replace(schedule="gpipe"), 3) == 16
    assert in_flight(Layout(accumulation=16), 0) == 1
    for p, m in ((4, 2), (4, 4), (8, 64)):
        assert in_flight(Layout(pipeline=p, accumulation=m), 0) == published.in_flight(m, p) == min(m, p)
        layout = Layout(pipeline=p, accumulation=m * p, schedule="interleaved_1f1b", virtual_stages=2)
        # ours: PyTorch's first rank has one pass of a stage more in flight
        assert in_flight(layout, 0) == pytest.approx(published.in_flight(m * p, p, 2), abs=p / 2)
