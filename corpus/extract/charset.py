"""Decode a page as browsers do, unless the bytes prove its declared encoding wrong.

    decode(body, "text/html; charset=iso-8859-1", "https://one.example/")

turbohtml provides the labels, decoders, <meta> scan and detector (Firefox's chardetng, with the
top-level domain as a hint), which follow the WHATWG Encoding and HTML standards. The first row that
fits wins; n is the number of non-ASCII characters:

| step | evidence | fits when |
|---|---|---|
| 1 | byte-order mark | always |
| 2 | UTF-16 that begins with two ASCII characters; ASCII with ISO-2022-JP escapes | always |
| 3 | the bytes are UTF-8 | n is 4 or more, errors <= n / 10 |
| 4 | Content-Type header, <meta>, <?xml encoding="…"?>: UTF-8 | errors <= n |
| | … UTF-16 | there is a NUL |
| | … any other (C1 controls are errors) | errors <= n / 20, or one |
| | … single-byte | also: not all n are valid UTF-8 |
| 5 | the bytes are UTF-8 | errors <= n |
| 6 | the detector | always; falls back to windows-1252 |

Browsers always accept a declaration and lack steps 2 and 3. In steps 3 to 5 a character truncated
at the end is not an error.
"""

import codecs
import re
from collections.abc import Iterator
from typing import NamedTuple

import turbohtml
from turbohtml import detect  # also registers the decoders

from corpus.urls.hosts import is_address
from corpus.urls.url import parse_url

_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_PARAMETER = re.compile(r"""(?:^|[;,\s])charset\s*=\s*["']?\s*([^\s"';,]+)""", re.IGNORECASE)
_XML = re.compile(rb"""\s*<\?xml\s[^>]*?\bencoding\s*=\s*(["'])([\w.:-]+)\1""")
_PRESCAN_BYTES = 1024
_HEAD_BYTES = 64 * 1024  # searched for <meta>: browsers read on after the prescan; scripts may come first
_ERROR = re.compile("[\ufffd\x80-\x9f]")
_SAMPLE_BYTES = 1 << 20  # for the detector, which reads a few megabytes per second
_NON_ASCII = re.compile(rb"[\x1b\x80-\xff]")
_MIN_UTF8 = 4  # two or three characters in legacy Chinese or Korean encodings may also be valid UTF-8
_UTF16 = ("UTF-16LE", "UTF-16BE")
_MULTIBYTE = frozenset({"GBK", "gb18030", "Big5", "EUC-JP", "EUC-KR", "Shift_JIS", "ISO-2022-JP"})


class _Utf8(NamedTuple):
    """A body decoded as UTF-8."""

    text: str
    good: int
    """Non-ASCII characters."""
    bad: int
    """Errors, not counting a character truncated at the end."""

    @property
    def fits(self) -> bool:
        """Whether there are at least as many valid characters as errors."""
        return self.good >= max(self.bad, 1) or self.text.isascii()


def _count_non_ascii(text: str) -> int:
    return len(text) - len(text.encode("ascii", "ignore"))


def _as_utf8(body: bytes) -> _Utf8:
    text, (complete, _) = body.decode("utf-8", "replace"), codecs.utf_8_decode(body, "replace", False)
    literal = body.count("\ufffd".encode())  # U+FFFD in the page itself
    good = _count_non_ascii(text) - text.count("\ufffd") + literal
    return _Utf8(text, good, complete.count("\ufffd") - literal)


def _unmarked(body: bytes) -> str | None:
    """The codec of UTF-16 that begins with two ASCII characters and no mark, or of ISO-2022-JP."""
    zeros = tuple(byte == 0 for byte in body[:4])
    if zeros == (False, True, False, True):
        return "utf-16-le"
    if zeros == (True, False, True, False):
        return "utf-16-be"
    has_escapes = b"\x1b" in body and body.isascii()
    return "whatwg-iso-2022-jp" if has_escapes and _detect(body, None) == "whatwg-iso-2022-jp" else None


def _encoding(label: str) -> str | None:
    """The WHATWG name of a label, or None if it is unknown."""
    try:
        return turbohtml.parse(b"", encoding=label).encoding
    except (LookupError, ValueError):
        return None


def _meta(body: bytes) -> str | None:
    """The encoding declared by <meta>; UTF-8 if it says UTF-16, which ASCII markup cannot be."""
    head = body[:_HEAD_BYTES]
    if b"charset" not in head.lower():
        return None
    page = turbohtml.parse(head, positions=False)
    return page.encoding if page.encoding_confidence == "certain" or page.encoding == "replacement" else None


def _xml(body: bytes) -> str | None:
    """The encoding of an XML declaration; UTF-8 if it says UTF-16, as for <meta>."""
    declaration = _XML.match(body[:1024])
    name = _encoding(declaration[2].decode("ascii", "replace")) if declaration else None
    return "UTF-8" if name in _UTF16 else name


def _declared(body: bytes, content_type: str) -> Iterator[str]:
    """The WHATWG names of the encodings that a page declares, in order of precedence."""
    header = _PARAMETER.search(content_type)
    if header and (name := _encoding(header[1])):
        yield name
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "text/plain":
        return
    for declared in (_xml, _meta) if "xml" in kind else (_meta, _xml):
        if name := declared(body):
            yield name


def _decode_as(name: str, body: bytes, utf8: _Utf8) -> str | None:
    """The text of a body in a declared encoding, or None if it does not fit."""
    if name == "UTF-8":
        return utf8.text if utf8.fits else None
    if name in _UTF16:
        return body.decode(f"whatwg-{name.lower()}") if b"\0" in body else None
    if utf8.good and not utf8.bad and name not in _MULTIBYTE:
        return None
    text = body.decode(f"whatwg-{name.lower()}")
    if name == "replacement" or text.isascii():
        return text
    errors, characters = len(_ERROR.findall(text)), _count_non_ascii(text)
    return text if errors <= max(1, characters // 20) and 2 * errors < characters else None


def _detect(body: bytes, tld: str | None) -> str:
    """Detect the codec from the bytes, ignoring declarations."""
    first = _NON_ASCII.search(body)
    start = max(0, first.start() - 64) if first else 0
    end = body.find(b"\n", start + _SAMPLE_BYTES)  # a line feed is never part of a character, in any encoding
    padding = b" " * _PRESCAN_BYTES  # the detector would obey a <meta> at the beginning
    sample = padding + body[start : end if end >= 0 else None]
    return detect.detect(sample, detect.Detection(tld=tld)).codec or "whatwg-windows-1252"


def _top_level_domain(url: str) -> str | None:
    """The last label of a URL's host; None for an address or a malformed URL."""
    try:
        host = parse_url(url).host
    except ValueError:
        return None
    return None if is_address(host) else host.rpartition(".")[2]


def decode(body: bytes, content_type: str, url: str = "") -> str:
    """Decode a page. Undecodable bytes become U+FFFD.

    As in browsers, a page that declares an encoding they refuse (hz-gb-2312, iso-2022-kr) becomes a
    single U+FFFD.
    """
    for mark, marked in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(marked, "replace")
    if codec := _unmarked(body):
        return body.decode(codec, "replace")
    utf8 = _as_utf8(body)
    if utf8.good >= _MIN_UTF8 and 10 * utf8.bad <= utf8.good:
        return utf8.text
    for name in _declared(body, content_type):
        if (text := _decode_as(name, body, utf8)) is not None:
            return text
    return utf8.text if utf8.fits else body.decode(_detect(body, _top_level_domain(url)))
