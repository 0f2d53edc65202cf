import gzip
import tracemalloc
import zlib
from collections.abc import Callable, Mapping
from functools import partial

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import PageError
from corpus.scrape.content_coding import decode_body

brotlied = partial(brotli.compress, quality=1)


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


def refused(body: bytes, encoding: str, limit: int, reason: str = "bad_encoding") -> None:
    with pytest.raises(PageError) as refusal:
        decode_body(body, encoding, limit)
    assert refusal.value.reason == reason


ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "X-GZIP ": gzip.compress,
    "deflate": zlib.compress,
    " Deflate": lambda body: zlib.compress(body)[2:-4],  # without zlib's header
    "deflate ": gzip.compress,
    "br": brotlied,
    "zstd": zstd,
    "ZSTD": lambda body: zstd(body[:9]) + zstd(body[9:]),
}
WORDS = b"".join(b"word %d " % number for number in range(20_000))


@settings(max_examples=30)
@given(st.binary(max_size=2000))
def test_every_chain_of_codings_is_decoded_and_damage_is_bad_encoding(body: bytes) -> None:
    for encoding in ("", "identity", " , identity"):
        assert decode_body(body, encoding, len(body)) == body
    for encoding, encode in ENCODERS.items():
        assert decode_body(encode(body), encoding, len(body)) == body
    assert decode_body(brotlied(gzip.compress(body)), "gzip, br", 4000) == body
    assert decode_body(zstd(zlib.compress(gzip.compress(body))), "gzip,deflate , identity, zstd", 4000) == body
    for damaged in (body, gzip.compress(body)[:-4] + b"abcd", zstd(body)[:-1] + b"\0", brotlied(body) + body):
        for encoding in ("gzip", "deflate", "br", "zstd", "gzip, br"):
            try:
                decode_body(damaged, encoding, 100_000)
            except PageError as error:
                assert error.reason == "bad_encoding"


@pytest.mark.parametrize("encoding", ENCODERS)
def test_a_large_body_is_decoded_up_to_the_limit_and_a_truncated_one_is_refused(encoding: str) -> None:
    packed = ENCODERS[encoding](WORDS)
    assert decode_body(packed, encoding, len(WORDS)) == WORDS
    refused(packed, encoding, len(WORDS) - 1, "too_large")
    for cut in (1, 3, len(packed) // 2, len(packed) - 1):
        refused(packed[:-cut], encoding, len(WORDS))
    assert decode_body(b"", encoding, 10) == b""
    refused(WORDS, "", len(WORDS) - 1, "too_large")


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_concatenated_streams_are_one_body(encoding: str) -> None:
    parts = [b"first ", b"", WORDS, b"last"]
    packed, body = [ENCODERS[encoding](part) for part in parts], b"".join(parts)
    assert decode_body(b"".join(packed), encoding, len(body)) == body
    refused(b"".join(packed)[:-1], encoding, len(body))
    refused(b"".join(packed[:2]) + packed[3][:6], encoding, len(body))
    refused(b"".join(packed), encoding, len(body) - 1, "too_large")
    assert decode_body(packed[1] * 9_999 + packed[3], encoding, len(body)) == b"last"
    refused(packed[1] * 10_000 + packed[3], encoding, len(body))  # each costs time


def test_data_after_a_complete_stream_is_ignored_and_so_are_skippable_frames() -> None:
    for encoding in ("gzip", "deflate", "zstd"):
        for rest in (b"\n", bytes(512), b"<!-- served by a proxy -->", b"\x1f", b"\x28\xb5"):
            assert decode_body(ENCODERS[encoding](WORDS) + rest, encoding, len(WORDS)) == WORDS
    skippable = b"\x5a\x2a\x4d\x18\x03\0\0\0abc"
    assert decode_body(skippable + zstd(b"one ") + skippable + zstd(b"two"), "zstd", 100) == b"one two"


def test_a_bomb_in_any_coding_costs_little_more_than_the_limit() -> None:
    member, frame = gzip.compress(bytes(1 << 25), 1, mtime=0), zstd(bytes(1 << 25))
    bombs = {
        "zstd": frame * 8,
        "gzip": member * 8,
        "gzip, gzip": gzip.compress(member * 8),
        "br": brotlied(bytes(1 << 25)),
    }
    for encoding, bomb in bombs.items():
        tracemalloc.start()
        try:
            refused(bomb, encoding, 2_000_000, "too_large")
            assert tracemalloc.get_traced_memory()[1] < 20_000_000, encoding
        finally:
            tracemalloc.stop()


def test_an_unknown_or_endless_coding_is_refused() -> None:
    for encoding in ("compress", "utf-8", "gzip, sdch", ", ".join(["gzip"] * 6), "gzip;q=1"):
        refused(gzip.compress(WORDS), encoding, len(WORDS))
    five = WORDS
    for _ in range(5):
        five = gzip.compress(five)
    assert decode_body(five, ", ".join(["gzip"] * 5), len(WORDS)) == WORDS
