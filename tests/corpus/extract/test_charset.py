from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.extract.charset import decode

GERMAN = "Größe, Übermut und Straße – für alle „Fälle“"
RUSSIAN = "Каждый охотник желает знать, где сидит фазан."
JAPANESE = "日本語のテキスト、①と㈱と髙島屋～"
KOREAN = "똠방각하와 펲시콜라를 좋아하는 한국어 문장"
HTML = "text/html"
LABELS = [
    *((label, "cp1252", GERMAN) for label in ("ISO-8859-1", " Windows-1252 ")),
    ("iso-8859-9", "cp1254", "İstanbul’da şöyle böyle, ağır “ığdır”"),
    ("tis-620", "cp874", "ภาษาไทย “อ้างอิง”"),
    ("shift_jis", "cp932", JAPANESE),
    ("euc-kr", "cp949", KOREAN),
    ("gb2312", "gb18030", "朱镕基与喆，𠀀和€"),
    ("big5", "big5hkscs", "廣東話嘅嗰啲字"),
    ("koi8-r", "koi8_r", RUSSIAN),
    ("iso-2022-jp", "iso2022_jp", "日本語のテキスト"),
]


def test_labels_mean_what_browsers_take_them_for() -> None:
    for label, codec, text in LABELS:
        body = f"<p>{text}</p>".encode(codec)
        assert decode(body, f"{HTML}; charset={label}") == f"<p>{text}</p>"
        assert decode(body, f'{HTML};Charset="{label}"; x=1') == f"<p>{text}</p>"
        for declaration in (
            f'<meta charset="{label}">',
            f"<META content='text/html; charset={label}' http-equiv=Content-Type>",
            f'<?xml version="1.0" encoding="{label.strip()}"?>',
            f"<script>{'x' * 5000}</script><meta charset='{label}'>",
        ):
            assert text in decode(declaration.encode() + body, HTML), declaration
    assert decode(b"<p>~{VPND~}</p>", f"{HTML}; charset=hz-gb-2312") == "\ufffd"  # browsers refuse it


EVIDENCE = [
    ("<meta charset=no-such-thing><meta charset=koi8-r>", HTML, "koi8_r"),
    ("<meta charset=koi8-r>", f"{HTML}; charset=utf-7", "koi8_r"),  # a trap, not a label of the web
    ("<meta charset=windows-1252>", f"{HTML}; charset=koi8-r", "koi8_r"),
    ("<?xml version='1.0' encoding='windows-1252'?><meta charset=koi8-r>", HTML, "koi8_r"),
    ("<?xml version='1.0' encoding='koi8-r'?><meta charset=windows-1252>", "application/xhtml+xml", "koi8_r"),
    ("<meta charset=windows-1252>", "text/plain; charset=koi8-r", "koi8_r"),
    ("<meta charset=windows-1252>", "text/plain", "koi8_r"),  # no <meta> in plain text: detected
    ("<meta charset=utf-16>", HTML, "utf-8"),
    ("<meta charset=koi8-r>", f"{HTML}; charset=koi8-r", "utf-8-sig"),
    ("<meta charset=koi8-r>", f"{HTML}; charset=koi8-r", "utf-16"),
    ("", f"{HTML}; charset=utf-8", "utf-16-le"),
    ("<p>", f"{HTML}; charset=utf-8", "iso2022_jp"),
    *(("", HTML, codec) for codec in ("cp1251", "koi8_r", "iso8859_5", "cp866")),  # undeclared: detected
]


def test_the_stronger_evidence_wins() -> None:
    for start, content_type, codec in EVIDENCE:
        text = f"{start}<p>{JAPANESE[:8] if codec == 'iso2022_jp' else RUSSIAN}</p>"
        assert decode(text.encode(codec), content_type) == text, (start, content_type, codec)


def test_utf8_and_windows_1252_are_told_apart_whatever_the_page_declares() -> None:
    for declared in ("", "; charset=utf-8", "; charset=no-such-thing"):
        for start in ("<p>", "<!DOCTYPE html>" + "<p>plain</p>" * 2000):
            for text in (f"{start}A café’s “menu” – naïve, isn’t it?", f"{start}It’s plain"):
                assert decode(text.encode("cp1252"), HTML + declared) == text
    for declared in ("", "; charset=utf-8"):  # one bad byte, or a character cut at the end
        assert decode(b"\xc3\xa9t\xc3\xa9 " * 200 + b"\xe9 ", HTML + declared) == "été " * 200 + "\ufffd "
        assert decode("été".encode() + b"\xff!", HTML + declared) == "été\ufffd!"
        assert decode(b"caf\xe9", HTML + declared) == "café"  # no other evidence for UTF-8


def test_a_declaration_that_the_bytes_contradict_is_not_believed() -> None:
    # valid UTF-8 of four characters wins over a declaration, and so do ten with one error
    assert decode("é".encode() * 3, f"{HTML}; charset=gbk") == "茅茅茅"
    assert decode("é".encode() * 4, f"{HTML}; charset=gbk") == "éééé"
    assert decode("é".encode() * 9 + b"\xff.", f"{HTML}; charset=iso-8859-1") == "Ã©" * 9 + "ÿ."
    assert decode("é".encode() * 10 + b"\xff.", f"{HTML}; charset=iso-8859-1") == "é" * 10 + "\ufffd."
    # of another encoding, a twentieth may be errors
    controls = "\x81\x8d\x8f\x90\x9d"
    assert decode(controls.encode("latin-1") + b"\xe9" * 95, f"{HTML}; charset=iso-8859-1") == controls + "é" * 95
    cut = f"<p>{JAPANESE}".encode("cp932")[:-1]
    assert decode(cut, f"{HTML}; charset=shift_jis") == f"<p>{JAPANESE[:-1]}\ufffd"
    czech = "Příliš žluťoučký kůň úpěl ďábelské ódy, šťastně žil a žije. " * 3
    assert decode(czech.encode("cp1250"), f"{HTML}; charset=iso-8859-2", "https://one.cz/") == czech
    assert decode("표".encode("cp949"), f"{HTML}; charset=euc-kr") == "표"  # two bytes that are also valid UTF-8


@settings(max_examples=30)
@given(st.binary(max_size=300), st.text(max_size=20), st.text(max_size=20))
def test_any_bytes_with_any_header_and_url_can_be_decoded(body: bytes, label: str, host: str) -> None:
    for start in (b"", b"<meta charset=big5>", b"\x1b$B", b"<\0"):
        decode(start + body, f"{HTML}; charset={label}", f"http://{host}.{host}/").encode("utf-8", "surrogatepass")
