"""Recognises files that no reader of text, JSON lines or WARC files can read, by their first bytes."""

_COMPRESSED = "-compressed; decompress it, or end its name in {} if it is text"
_CONVERT = "; convert it to JSON lines"
_FORMATS = {
    b"\xff\xff\xff\xff": "Arrow" + _CONVERT,
    b"ARROW1\0\0": "Arrow" + _CONVERT,
    b"PAR1\x15": "Parquet" + _CONVERT,
    b"\xff\xfe": "UTF-16 text (it begins with that byte-order mark); convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text (it begins with that byte-order mark); convert it to UTF-8",
    b"\0\0\xfe\xff": "UTF-32 text (it begins with that byte-order mark); convert it to UTF-8",  # FF FE 00 00, too
    b"\x1f\x8b\x08": "gzip" + _COMPRESSED.format(".gz"),
    b"\x28\xb5\x2f\xfd": "zstd" + _COMPRESSED.format(".zst"),
    b"\xfd7zXZ\0": "xz" + _COMPRESSED.format(".xz"),
    b"BZh91AY&SY": "bzip2" + _COMPRESSED.format(".bz2"),
    b"PK\x03\x04": "a zip archive; unpack it",
    b"WARC/": "WARC; python -m corpus.scrape --warc extracts its pages",
    b"filedesc://": "ARC; convert it: warcio recompress FILE.arc.gz FILE.warc.gz",
}
HEAD = 512
"""Bytes that `foreign` needs; tar's name is at byte 257."""


def foreign(head: bytes) -> str:
    """What a file that begins with `head` is, and the cure; empty if it may be text."""
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it"
    return next((name for magic, name in _FORMATS.items() if head.startswith(magic)), "")
