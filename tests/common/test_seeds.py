"""Derived seeds stay what they were: initial values and dropout of existing runs depend on them."""

from common.seeds import derive_seed


def test_a_seed_is_a_pure_function_of_its_words() -> None:
    assert derive_seed(1234, "wte.weight") == 5136673422071673057
    assert derive_seed(1234, "wte.weight") != derive_seed(1235, "wte.weight") != derive_seed(1235, "wpe.weight")
    assert 0 <= derive_seed() < 2**63
