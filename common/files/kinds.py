"""What a file or page is, by its first bytes; and whether it is text at all."""

import re

HEAD = 1 << 13  # bytes by which a format is recognised; they may be compressed
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # UTF-8's
COMPRESSIONS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"\xfd7zXZ\0": ".xz", b"BZh": ".bz2"}
BINARY = "leave it out"  # the cure for binary data
_BLANK = BYTE_ORDER_MARK + b" \t\r\n\f"
# MIME Sniffing's "binary data bytes" without backspace and line tabulation
_DATA = rb"[\0-\x07\x0e-\x1a\x1c-\x1f]"
_HEADED = rb"(?=(?s:.){0,28}" + _DATA + rb")"  # after letters with which a text may begin
_UTF16 = ("UTF-16 text", "convert it to UTF-8, or give a source the encoding utf-16")
_UNPACK, _CONVERT = "unpack it, and name its files", "convert it to Parquet"
_TABLE = "python -m corpus.ingest reads it"
_KINDS = {
    rb"\xff\xfe|\xfe\xff": _UTF16,
    rb"WARC/": ("WARC", "python -m corpus.scrape --warc extracts its pages"),
    rb"filedesc://": ("ARC", "warcio recompress makes it WARC"),
    rb"%PDF-": ("PDF", "extract its text first, with pdftotext"),
    rb"PAR1" + _HEADED: ("Parquet", _TABLE),
    rb"ARROW1\0|\xff\xff\xff\xff": ("Arrow", _TABLE),  # the second: a stream, the mark before each message
    rb"PK(\x03\x04|\x05\x06|\x07\x08)": ("a zip archive", _UNPACK),
    rb"7z\xbc\xaf": ("a 7z archive", _UNPACK),
    rb"Rar!\x1a": ("a RAR archive", _UNPACK),
    rb"\x1f\x9d|LZIP\x01|MSCF\0|\xed\xab\xee\xdb": ("an archive", _UNPACK),
    rb"\x04\x22\x4d\x18": ("LZ4-compressed", "decompress it"),
    rb"\x89PNG|\xff\xd8\xff|II\*\0|MM\0\*|\0\0\x01\0|(GIF8|BM|8BPS)" + _HEADED: ("an image", BINARY),
    rb"\xff[\xfb\xfa\xf3\xf2]|\x1a\x45\xdf\xa3|\0{3}(?s:.)ftyp|(RIFF|FORM|ID3|OggS|fLaC|MThd|FLV|[CF]WS)" + _HEADED: (
        "audio or video", BINARY),
    rb"\x7fELF|\0asm|\xca\xfe\xba\xbe|\xfe\xed\xfa[\xce\xcf]|[\xce\xcf]\xfa\xed\xfe|(MZ|dex\n)" + _HEADED: (
        "a program", BINARY),
    rb"\0\x01\0\0\0|(wOF[F2]|OTTO)" + _HEADED: ("a font", BINARY),
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an Office document", "extract its text first"),
    rb"SQLite format 3\0": ("an SQLite database", "export a table as CSV"),
    rb"ORC" + _HEADED: ("ORC", _CONVERT),
    rb"Obj\x01": ("Avro", _CONVERT),
    rb"FEA1" + _HEADED: ("Feather of version 1", _CONVERT),
    rb"\x93NUMPY": ("a NumPy array", "give the text that it was made from"),
    rb"\x89HDF": ("HDF5", _CONVERT),
    rb"version https://git-lfs": ("a pointer of Git LFS", "get the file itself with git lfs pull"),
} | {re.escape(magic): (f"{suffix}-compressed", f"decompress it, or end its name in {suffix}")
     for magic, suffix in COMPRESSIONS.items()}  # fmt: skip
"""How a file or page begins, what it is, and the cure for a file."""
_TAR = slice(257, 262)  # where a tar archive has b"ustar"


def kind_of(head: bytes) -> tuple[str, str]:
    """The format that begins with `head`, after white space, and the cure; empty for text."""
    if head[_TAR] == b"ustar":
        return "a tar archive", _UNPACK
    head = head[:HEAD].lstrip(_BLANK)
    return next((kind for pattern, kind in _KINDS.items() if re.match(pattern, head)), ("", ""))


def is_binary(head: bytes) -> bool:
    """Whether `head` begins a binary format."""
    return kind_of(head)[0] not in ("", "WARC", "ARC", _UTF16[0])


def is_torn(data: bytes, begin: bytes) -> bool:
    """Whether `data` can be what a power cut left of our file, which begins with `begin`.

    That is nothing or a part of `begin`, then zeros, noise or `begin` again. A text, or a format
    that `kind_of` knows, is somebody else's file.
    """
    data = data.rstrip(b"\0")
    same = next(length for length in range(len(begin), -1, -1) if data.startswith(begin[:length]))
    rest = data[same:]
    if same == len(begin) or begin.startswith(rest) or rest.startswith(begin):
        return True
    return re.search(_DATA, rest) is not None and not kind_of(data)[0]


def is_noise(text: bytes) -> bool:
    """Whether over 2 % of the beginning are control characters; random bytes have 10 %."""
    head = text[:HEAD]
    return len(re.findall(_DATA, head)) > 2 + len(head) // 50
