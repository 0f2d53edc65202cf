import gzip
import tracemalloc
import zlib
from collections.abc import Callable, Mapping

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from common.errors import PageError
from corpus.scrape.content_coding import decode_body


def raw_deflate(body: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(body) + stream.flush()


def brotlied(body: bytes) -> bytes:
    return brotli.compress(body, quality=1)


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


def streamed_zstd(body: bytes) -> bytes:
    stream = zstandard.ZstdCompressor(level=1).compressobj()
    return stream.compress(body) + stream.flush()


ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "X-GZIP ": gzip.compress,
    "deflate": zlib.compress,
    " Deflate": raw_deflate,
    "deflate ": gzip.compress,
    "br": brotlied,
    "zstd": zstd,
    "ZSTD": streamed_zstd,
}
WORDS = b"".join(b"word %d " % number for number in range(20_000))


@given(st.binary(max_size=2000))
def test_every_chain_of_codings_is_decoded(body: bytes) -> None:
    for encoding in ("", "identity", " , identity"):
        assert decode_body(body, encoding, len(body)) == body
    for encoding, encode in ENCODERS.items():
        assert decode_body(encode(body), encoding, len(body)) == body
    assert decode_body(brotlied(gzip.compress(body)), "gzip, br", 4000) == body
    assert decode_body(zstd(zlib.compress(gzip.compress(body))), "gzip,deflate , identity, zstd", 4000) == body


@pytest.mark.parametrize("encoding", ENCODERS)
def test_a_large_body_is_decoded_and_a_truncated_one_is_refused(encoding: str) -> None:
    packed = ENCODERS[encoding](WORDS)
    assert decode_body(packed, encoding, len(WORDS)) == WORDS
    for cut in (1, 3, len(packed) // 2, len(packed) - 1):
        with pytest.raises(PageError, match="bad_encoding"):
            decode_body(packed[:-cut], encoding, len(WORDS))
    with pytest.raises(PageError, match="too_large"):
        decode_body(packed, encoding, len(WORDS) - 1)


@pytest.mark.parametrize("encode", [gzip.compress, zstd])
def test_concatenated_streams_are_one_body(encode: Callable[[bytes], bytes]) -> None:
    encoding = "gzip" if encode is gzip.compress else "zstd"
    parts = [b"first ", b"", WORDS, b"last"]
    packed = [encode(part) for part in parts]
    body = b"".join(parts)
    assert decode_body(b"".join(packed), encoding, len(body)) == body
    with pytest.raises(PageError, match="bad_encoding"):
        decode_body(b"".join(packed)[:-1], encoding, len(body))
    with pytest.raises(PageError, match="bad_encoding"):
        decode_body(b"".join(packed[:2]) + packed[3][:6], encoding, len(body))
    with pytest.raises(PageError, match="too_large"):
        decode_body(b"".join(packed), encoding, len(body) - 1)
    with pytest.raises(PageError, match="bad_encoding"):
        decode_body(packed[1] * 20_000, encoding, len(body))  # each costs time
    assert decode_body(packed[1] * 5_000 + packed[3], encoding, len(body)) == b"last"


@pytest.mark.parametrize("rest", [b"\n", bytes(512), b"<!-- served by a proxy -->", b"\x1f", b"\x28\xb5"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_data_after_a_complete_stream_is_ignored(encoding: str, rest: bytes) -> None:
    assert decode_body(ENCODERS[encoding](WORDS) + rest, encoding, len(WORDS)) == WORDS
    assert decode_body(ENCODERS[encoding](b"") + rest, encoding, 10) == b""


def test_skippable_frames_are_skipped() -> None:
    skippable = b"\x5a\x2a\x4d\x18\x03\0\0\0abc"
    assert decode_body(skippable + zstd(b"one ") + skippable + zstd(b"two"), "zstd", 100) == b"one two"


def bombs() -> Mapping[str, bytes]:
    """Hundreds of megabytes of zeros, in kilobytes."""
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 25))
    member = gzip.compress(bytes(1 << 25), 1, mtime=0)
    return {
        "zstd": frame * 8,
        "gzip": member * 8,
        "gzip, gzip": gzip.compress(member * 8),
        "br": brotlied(bytes(1 << 25)),
    }


def test_a_bomb_in_any_coding_costs_little_more_than_the_limit() -> None:
    for encoding, bomb in bombs().items():
        assert len(bomb) < 2_000_000
        tracemalloc.start()
        try:
            with pytest.raises(PageError, match="too_large"):
                decode_body(bomb, encoding, 2_000_000)
            assert tracemalloc.get_traced_memory()[1] < 20_000_000, encoding
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["compress", "utf-8", "gzip, sdch", ", ".join(["gzip"] * 6), "gzip;q=1"])
def test_an_unknown_or_endless_coding_is_refused(encoding: str) -> None:
    with pytest.raises(PageError, match="bad_encoding"):
        decode_body(gzip.compress(WORDS), encoding, len(WORDS))


@given(st.binary(max_size=200), st.sampled_from(["gzip", "deflate", "br", "zstd", "gzip, br"]))
def test_damage_is_bad_encoding(body: bytes, encoding: str) -> None:
    for damaged in (body, gzip.compress(body)[:-4] + b"abcd", zstd(body)[:-1] + b"\0", brotlied(body) + body):
        try:
            decode_body(damaged, encoding, 100_000)
        except PageError as error:
            assert error.reason == "bad_encoding"


def test_a_body_without_a_coding_is_bounded_too() -> None:
    assert decode_body(b"", "gzip", 10) == decode_body(b"", "br", 10) == b""
    with pytest.raises(PageError, match="too_large"):
        decode_body(bytes(1001), "", 1000)
    assert len(decode_body(gzip.compress(bytes(1000)), "gzip", 1000)) == 1000
