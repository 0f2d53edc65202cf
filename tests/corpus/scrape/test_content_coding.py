import gzip
import tracemalloc
import zlib
from collections.abc import Callable, Mapping
from functools import partial

import brotli
import pytest
import zstandard

from common.errors import PageError
from corpus.scrape.response import decode_body, media_type, unframed

brotlied = partial(brotli.compress, quality=1)
SKIPPABLE = b"\x5f\x2a\x4d\x18\x04\0\0\0skip"  # a zstd frame
ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "X-GZIP ": lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:]),
    " Deflate": lambda body: zlib.compress(body)[2:-4],  # without zlib's header
    "deflate ": zlib.compress,
    "br": brotlied,
    "zstd": lambda body: zstandard.compress(body[:9]) + SKIPPABLE + zstandard.compress(body[9:]),
}
WORDS = b"".join(b"word %d " % number for number in range(20_000))


def refused(body: bytes, encoding: str, limit: int, reason: str = "bad_encoding") -> None:
    with pytest.raises(PageError) as refusal:
        decode_body(body, encoding, limit)
    assert refusal.value.reason == reason


@pytest.mark.parametrize("encoding", ENCODERS)
def test_a_body_of_one_or_more_streams_is_decoded_up_to_the_limit_and_a_truncated_one_is_refused(encoding: str) -> None:
    packed = ENCODERS[encoding](WORDS)
    for more in (b"",) if encoding == "br" else (b"", b"<!-- by a proxy -->"):
        assert decode_body(packed + more, encoding, len(WORDS)) == WORDS
    refused(packed, encoding, len(WORDS) - 1, "too_large")
    for cut in (1, 3, len(packed) // 2, len(packed) - 1):
        refused(packed[:-cut], encoding, len(WORDS))
    refused(WORDS, "", len(WORDS) - 1, "too_large")


def test_a_chain_of_known_codings_is_decoded_from_its_end() -> None:
    chain = zstandard.compress(zlib.compress(gzip.compress(WORDS)))
    assert decode_body(chain, "gzip,deflate , identity, zstd", len(WORDS)) == WORDS
    for encoding in ("none", "UTF-8", "compress, sdch", "gzip;q=1", ""):
        assert decode_body(WORDS, encoding, len(WORDS)) == WORDS, encoding
    refused(gzip.compress(WORDS), ", ".join(["gzip"] * 6), len(WORDS))
    for damaged in (WORDS, gzip.compress(WORDS)[:-4] + b"abcd"):
        refused(damaged, "gzip", len(WORDS))


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


def test_chunks_are_taken_apart_whatever_the_header_calls_them_and_other_bodies_stay_as_they_are() -> None:
    chunked = b"1;name=value\r\n<\r\n00A \r\n>ten bytes\r\n0\r\n"
    for header in ("CHUNKED", "gzip, chunked", "identity", "chunked, identity"):
        for end in (b"\r\n", b"Expires: now\r\nX: y\r\n\r\n", b""):
            headers = [("transfer-ENCODING", header), ("Content-Encoding", "br")]
            assert unframed(chunked + end, headers) == (b"<>ten bytes", f"br, {header}")
    for body in (b"<p>", b"2024\ntext", b"a", b""):
        assert unframed(body, [("Transfer-Encoding", "chunked")])[0] == body
    assert unframed(b"5\r\ncut", [("Transfer-Encoding", "chunked")])[0] == b"cut"
    assert unframed(chunked, [("Content-Type", "text/html")])[0] == chunked


def test_the_last_valid_content_type_counts_with_the_charset_of_its_type() -> None:
    expected = {
        ("text/html, text/html; charset=utf-8",): ("text/html; charset=utf-8", "text/html"),
        ("Text/HTML;charset=a", "text/html", "*/*, html"): ("Text/HTML;charset=a", "text/html"),
        ('text/plain; x="a, text/html"',): ('text/plain; x="a, text/html"', "text/plain"),
        ("text/html;charset=a, application/pdf",): ("application/pdf", "application/pdf"),
        ("text/html charset=a",): ("text/html charset=a", "text/html"),
        ("html",): ("", ""), (): ("", ""),
    }  # fmt: skip
    for values, chosen in expected.items():
        assert media_type([("CONTENT-type", value) for value in values]) == chosen, values
