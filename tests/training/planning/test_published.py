"""The published estimates, and how far ours are from them."""

import pytest

from common.settings import ModelSettings
from tests.training.planning.cases import GPU
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


def test_bytes_per_parameter_are_those_of_the_papers() -> None:
    assert published.parameters(24, H) == 301_989_888
    assert 24 * MODEL.layer_parameters == pytest.approx(published.parameters(24, H), rel=0.002)
    per = published.bytes_per_parameter
    assert [per(kind) for kind in ("zero 0", "float16", "bfloat16", "float32")] == [16, 20, 18, 16]
    assert per("bfloat16 distributed", 4) == 6 + 12 / 4
    assert per("float16 distributed", 4) == 4 + 16 / 4
    # the paper's figure 1: 7.5 B parameters on 64 GPUs
    assert [round(7.5 * per(f"zero {stage}", 64), 1) for stage in (0, 1, 2, 3)] == [120.0, 31.4, 16.6, 1.9]


def test_a_layer_keeps_34_bytes_per_token_and_channel_and_its_share_on_a_tensor_parallel_rank() -> None:
    assert published.layer_activations(S, B, H, A) == S * B * H * (34 + 5 * A * S / H)
    assert published.flash_layer_activations(S, B, H) == 34 * S * B * H
    assert saved(Layout()) == 34 * S * B * H + SMALL
    for t in (2, 4, 8):
        assert published.flash_layer_activations(S, B, H, t) == S * B * H * (10 + 24 / t)
        assert saved(Layout(tensor=t)) == pytest.approx(S * B * H * (10 + 24 / t), rel=0.01)
        theirs = published.flash_layer_activations(S, B, H, t, sequence_parallel=True)
        assert theirs == 34 * S * B * H / t
        inputs = 4 * S * B * H * (1 - 1 / t)  # of split products, which ours keep whole
        assert saved(Layout(tensor=t, sequence_parallel=True)) == pytest.approx(theirs + inputs, rel=0.01)
    dry = Workload(MODEL.model_copy(update={"dropout": 0.0}), "bfloat16", compiled=True)
    assert saved(Layout()) - saved(Layout(), dry) == 2 * S * B * H  # two masks of a byte


def test_full_recompute_keeps_the_input_of_a_layer() -> None:
    assert saved(Layout(recompute="full")) == published.full_recompute_activations(S, B, H) == 2 * S * B * H


def test_ours_keep_logits_in_two_bytes_where_the_paper_counts_four() -> None:
    assert published.head_activations(S, B, H, V) == 4 * S * B * H * (1 + V / H)
    assert published.head_activations(S, B, H, V, 8) == 4 * S * B * H * (1 + V / H) / 8
    layout = Layout(micro_batch_size=B)
    loss = loss_bytes(WORKLOAD, layout, GPU, layer_bytes(WORKLOAD, layout, GPU))
    cast = 2 * V * H  # of the head's weight, which the paper's mixed precision has in any case
    assert loss.saved - cast + loss.logits == published.head_activations(S, B, H, V) - 2 * S * B * V


def test_pipelines_keep_the_published_number_of_micro_batches() -> None:
    pipeline = Layout(pipeline=4, accumulation=16)
    assert [in_flight(pipeline, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(pipeline._replace(schedule="gpipe"), 3) == 16
    assert in_flight(Layout(accumulation=16), 0) == 1
    for p, m in ((2, 1), (4, 2), (4, 4), (4, 32), (8, 64)):
        assert in_flight(Layout(pipeline=p, accumulation=m), 0) == published.in_flight(m, p) == min(m, p)
        for v in (2, 4):
            layout = Layout(pipeline=p, accumulation=m * p, schedule="interleaved_1f1b", virtual_stages=v)
            # ours: PyTorch's first rank has one pass of a stage more in flight
            assert published.in_flight(m * p, p, v) == p * (1 + (p - 1) / (p * v))
            assert in_flight(layout, 0) == pytest.approx(published.in_flight(m * p, p, v), abs=p / v)
