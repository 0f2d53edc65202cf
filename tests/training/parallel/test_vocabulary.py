"""A padded vocabulary changes neither the loss nor the gradients."""


from common.settings import ModelSettings
from training.parallel.vocabulary import padded_vocab_size

SMALL = ModelSettings(n_layer=3, n_head=4, n_embd=64, seq_len=48, vocab_size=211, dropout=0.0)


def test_the_vocabulary_is_padded_to_a_multiple_of_128_times_tp() -> None:
    assert [padded_vocab_size(50257, tensor) for tensor in (1, 2, 4, 8)] == [50304, 50432, 50688, 51200]
    assert [padded_vocab_size(size, 1) for size in (128, 129)] == [128, 256]
