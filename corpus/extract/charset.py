"""The characters of a page: what browsers read, unless the bytes prove a declaration wrong.

    decode(body, "text/html; charset=iso-8859-1", "https://one.example/")

Labels, decoders, the scan for <meta> and the detector (Firefox's chardetng, which takes the host's top-level domain as
a hint) are turbohtml's, after the WHATWG Encoding and HTML standards. The first of these that fits is taken; n is the
number of characters beyond ASCII:

| step | evidence | fits when |
|---|---|---|
| 1 | byte-order mark | always |
| 2 | UTF-16 that begins with two ASCII characters; ASCII with the escapes of ISO-2022-JP | always |
| 3 | the bytes are UTF-8 | n is 4 or more, errors <= n / 10 |
| 4 | Content-Type header, <meta>, <?xml encoding="…"?>: UTF-8 | errors <= n |
| | … UTF-16 | there is a NUL |
| | … another | errors <= n / 20, or one; C1 controls are errors. With one byte per character: n are not all UTF-8 |
| 5 | the bytes are UTF-8 | errors <= n |
| 6 | the detector | always; its last resort is windows-1252 |

In browsers a declaration always fits, and steps 2 and 3 do not exist. `python -m benchmarks.corpus charset` counts the
characters lost. In steps 3 to 5 a character that is cut off at the end is no error.
"""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import turbohtml
from turbohtml import detect  # registers the decoders, too

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_PARAMETER = re.compile(r"""(?:^|[;,\s])charset\s*=\s*["']?\s*([^\s"';,]+)""", re.IGNORECASE)
_XML = re.compile(rb"""\s*<\?xml\s[^>]*?\bencoding\s*=\s*(["'])([\w.:-]+)\1""")
_PRESCAN_BYTES = 1024
_HEAD_BYTES = 64 * 1024  # searched for <meta>: browsers, too, read on after the prescan, and scripts may come first
_ERROR = re.compile("[\ufffd\x80-\x9f]")
_SAMPLE_BYTES = 1 << 20  # for the detector, from the first character beyond ASCII on: it reads a few megabytes a second
_FOREIGN = re.compile(rb"[\x1b\x80-\xff]")
_MANY = 4  # two or three characters of Chinese or Korean in their old encodings may be UTF-8, too
_UTF16 = ("UTF-16LE", "UTF-16BE")
_MULTIBYTE = frozenset({"GBK", "gb18030", "Big5", "EUC-JP", "EUC-KR", "Shift_JIS", "ISO-2022-JP"})


@dataclass(frozen=True)
class _Utf8:
    """A body read as UTF-8."""

    text: str
    good: int
    """Characters beyond ASCII."""
    bad: int
    """Errors, without a character that is cut off at the end."""

    @property
    def fits(self) -> bool:
        """Whether more is right than wrong."""
        return self.good >= max(self.bad, 1) or self.text.isascii()


def _beyond_ascii(text: str) -> int:
    return len(text) - len(text.encode("ascii", "ignore"))


def _as_utf8(body: bytes) -> _Utf8:
    if body.isascii():
        return _Utf8(body.decode("ascii"), 0, 0)
    try:
        text = body.decode("utf-8")
        return _Utf8(text, _beyond_ascii(text), 0)
    except UnicodeDecodeError:
        text, (uncut, _) = body.decode("utf-8", "replace"), codecs.utf_8_decode(body, "replace", False)
        written = body.count("\ufffd".encode())  # by whoever made the page
        good = _beyond_ascii(text) - text.count("\ufffd") + written
        return _Utf8(text, good, uncut.count("\ufffd") - written)


def _unmarked(body: bytes) -> str | None:
    """The codec of UTF-16 without a mark that begins with two ASCII characters, or of ISO-2022-JP; else None."""
    zeros = tuple(byte == 0 for byte in body[:4])
    if zeros == (False, True, False, True):
        return "utf-16-le"
    if zeros == (True, False, True, False):
        return "utf-16-be"
    return "whatwg-iso-2022-jp" if _has_escapes(body) and _detect(body, None) == "whatwg-iso-2022-jp" else None


def _has_escapes(body: bytes) -> bool:
    return b"\x1b" in body and body.isascii()


def _encoding(label: str) -> str | None:
    """The standard's name for a label, or None for an unknown one."""
    try:
        return turbohtml.parse(b"", encoding=label).encoding
    except (LookupError, ValueError):
        return None


def _meta(body: bytes) -> str | None:
    """The encoding that a <meta> declares; UTF-8 where it says UTF-16, which it could not say in UTF-16."""
    head = body[:_HEAD_BYTES]
    if b"charset" not in head.lower():
        return None
    page = turbohtml.parse(head, positions=False)
    return page.encoding if page.encoding_confidence == "certain" or page.encoding == "replacement" else None


def _xml(body: bytes) -> str | None:
    """The encoding of an XML declaration; UTF-8 where it says UTF-16, as for <meta>."""
    found = _XML.match(body[:1024])
    name = _encoding(found[2].decode("ascii", "replace")) if found else None
    return "UTF-8" if name in _UTF16 else name


def _declared(body: bytes, content_type: str) -> Iterator[str]:
    """What a page declares, by the standard's names, the strongest declaration first."""
    header = _PARAMETER.search(content_type)
    if header and (name := _encoding(header[1])):
        yield name
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "text/plain":
        return
    for look in (_xml, _meta) if "xml" in kind else (_meta, _xml):
        if name := look(body):
            yield name


def _read_as(name: str, body: bytes, utf8: _Utf8) -> str | None:
    """The text of a body in a declared encoding, or None where it does not fit."""
    if name == "UTF-8":
        return utf8.text if utf8.fits else None
    if name in _UTF16:
        return body.decode(f"whatwg-{name.lower()}") if b"\0" in body else None
    if utf8.good and not utf8.bad and name not in _MULTIBYTE:
        return None
    text = body.decode(f"whatwg-{name.lower()}")
    if name == "replacement" or text.isascii():
        return text
    errors, characters = len(_ERROR.findall(text)), _beyond_ascii(text)
    return text if errors <= max(1, characters // 20) and 2 * errors < characters else None


def _detect(body: bytes, tld: str | None) -> str:
    """The codec that the bytes look like, whatever they declare."""
    first = _FOREIGN.search(body)
    start = max(0, first.start() - 64) if first else 0
    end = body.find(b"\n", start + _SAMPLE_BYTES)  # the end of a line is no part of a character in any encoding
    unseen = b" " * _PRESCAN_BYTES  # it would obey a <meta> at the beginning
    found = detect.detect(unseen + body[start : end if end >= 0 else None], detect.Detection(tld=tld))
    return found.codec or "whatwg-windows-1252"


def _top_level_domain(url: str) -> str | None:
    """The last label of the URL's host; None for an address."""
    try:
        host = urlsplit(url).hostname or ""
        label = host.rpartition(".")[2].encode("idna").decode("ascii").lower()
    except ValueError:
        return None
    return label if re.fullmatch(r"(?!\d+$)[a-z0-9-]+", label) else None


def decode(body: bytes, content_type: str, url: str = "") -> str:
    """The characters of a page. What cannot be read is U+FFFD.

    A page that declares an encoding that browsers refuse (hz-gb-2312, iso-2022-kr) is one U+FFFD, as in browsers.
    """
    for mark, marked in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(marked, "replace")
    if codec := _unmarked(body):
        return body.decode(codec, "replace")
    utf8 = _as_utf8(body)
    if utf8.good >= _MANY and 10 * utf8.bad <= utf8.good:
        return utf8.text
    for name in _declared(body, content_type):
        if (text := _read_as(name, body, utf8)) is not None:
            return text
    return utf8.text if utf8.fits else body.decode(_detect(body, _top_level_domain(url)))
