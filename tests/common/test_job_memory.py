import pytest

from common.job_memory import evaluate_mb, generate_mb, merge_mb
from common.settings import ModelSettings

SMALL = ModelSettings(n_layer=12, n_head=12, n_embd=768)
MEDIUM = ModelSettings(n_layer=24, n_head=16, n_embd=1024)
SEVEN = ModelSettings(n_layer=32, n_head=32, n_embd=4096, seq_len=2048)


def test_a_rule_asks_for_what_was_measured_and_for_two_copies_only_where_two_are_held() -> None:
    # peaks in MB at 124M, and at 355M
    assert 473 < merge_mb(SMALL) < 1500 and 6197 < evaluate_mb(SMALL) < 9000 and 1226 < generate_mb(SMALL) < 2500
    assert 528 < merge_mb(MEDIUM) < 1500 and 2974 < generate_mb(MEDIUM) < 5000
    copy = 4 * SEVEN.parameters / 1e6
    assert copy == pytest.approx(26_600, rel=0.01)
    assert min(evaluate_mb(SEVEN), generate_mb(SEVEN)) > 2 * copy
    assert merge_mb(SEVEN) < copy / 8  # tensors are merged one by one
