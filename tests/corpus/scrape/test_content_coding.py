import gzip
import tracemalloc
import zlib
from collections.abc import Callable, Mapping
from functools import partial

import brotli
import pytest
import zstandard

from common.errors import PageError
from corpus.scrape.response import decode_body

brotlied = partial(brotli.compress, quality=1)
ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "X-GZIP ": gzip.compress,
    " Deflate": lambda body: zlib.compress(body)[2:-4],  # without zlib's header
    "deflate ": zlib.compress,
    "br": brotlied,
    "zstd": lambda body: zstandard.compress(body[:9]) + zstandard.compress(body[9:]),
}
WORDS = b"".join(b"word %d " % number for number in range(20_000))


def refused(body: bytes, encoding: str, limit: int, reason: str = "bad_encoding") -> None:
    with pytest.raises(PageError) as refusal:
        decode_body(body, encoding, limit)
    assert refusal.value.reason == reason


@pytest.mark.parametrize("encoding", ENCODERS)
def test_a_large_body_is_decoded_up_to_the_limit_and_a_truncated_one_is_refused(encoding: str) -> None:
    packed = ENCODERS[encoding](WORDS)
    assert decode_body(packed, encoding, len(WORDS)) == WORDS
    refused(packed, encoding, len(WORDS) - 1, "too_large")
    for cut in (1, 3, len(packed) // 2, len(packed) - 1):
        refused(packed[:-cut], encoding, len(WORDS))
    refused(WORDS, "", len(WORDS) - 1, "too_large")


def test_a_chain_of_known_codings_is_decoded_from_its_end() -> None:
    chain = zstandard.compress(zlib.compress(gzip.compress(WORDS)))
    assert decode_body(chain, "gzip,deflate , identity, zstd", len(WORDS)) == WORDS
    for encoding in ("compress", "gzip, sdch", ", ".join(["gzip"] * 6), "gzip;q=1"):
        refused(gzip.compress(WORDS), encoding, len(WORDS))
    for damaged in (WORDS, gzip.compress(WORDS)[:-4] + b"abcd"):
        refused(damaged, "gzip", len(WORDS))


def test_streams_may_be_concatenated_and_other_data_after_them_is_ignored() -> None:
    encoders: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstandard.compress}
    for encoding, encode in encoders.items():
        packed = encode(WORDS) + encode(b"last")
        assert decode_body(packed + b"<!-- by a proxy -->", encoding, len(WORDS) + 4) == WORDS + b"last"
        refused(packed[:-1], encoding, len(WORDS) + 4)


def test_a_bomb_in_any_coding_costs_little_more_than_the_limit() -> None:
    member, frame = gzip.compress(bytes(1 << 25), 1, mtime=0), zstandard.compress(bytes(1 << 25))
    bombs = {"zstd": frame * 8, "gzip, gzip": gzip.compress(member * 8), "br": brotlied(bytes(1 << 25))}
    for encoding, bomb in bombs.items():
        tracemalloc.start()
        try:
            refused(bomb, encoding, 2_000_000, "too_large")
            assert tracemalloc.get_traced_memory()[1] < 20_000_000, encoding
        finally:
            tracemalloc.stop()
