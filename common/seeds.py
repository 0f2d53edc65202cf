"""Seeds for random generators, derived from names and numbers."""

import hashlib


def derive_seed(*words: object) -> int:
    """A 63-bit seed that differs for every sequence of words: `derive_seed(1234, "wte.weight")`."""
    digest = hashlib.sha256(":".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
