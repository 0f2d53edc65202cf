import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.charset import lost_characters, undeclared
from benchmarks.extract import read_articles
from corpus.extract.charset import decode
from corpus.extract.extractors import extract, load_extractors
from tests.helpers import prose

GERMAN = "Größe, Übermut und Straße – für alle „Fälle“"
RUSSIAN = "Каждый охотник желает знать, где сидит фазан."
JAPANESE = "日本語のテキスト、①と㈱と髙島屋～"
KOREAN = "똠방각하와 펲시콜라를 좋아하는 한국어 문장"
HTML = "text/html"


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        ("ISO-8859-1", "cp1252", GERMAN),
        ("latin1", "cp1252", GERMAN),
        ("us-ascii", "cp1252", GERMAN),
        (" Windows-1252 ", "cp1252", GERMAN),
        ("iso-8859-9", "cp1254", "İstanbul’da şöyle böyle, ağır “ığdır”"),
        ("tis-620", "cp874", "ภาษาไทย “อ้างอิง”"),
        ("iso-8859-11", "cp874", "ภาษาไทย…"),
        ("shift_jis", "cp932", JAPANESE),
        ("x-sjis", "cp932", JAPANESE),
        ("euc-kr", "cp949", KOREAN),
        ("ks_c_5601-1987", "cp949", KOREAN),
        ("gb2312", "gb18030", "朱镕基与喆，𠀀和€"),
        ("gbk", "gb18030", "朱镕基与喆，𠀀和€"),
        ("big5", "big5hkscs", "廣東話嘅嗰啲字"),
        ("koi8-r", "koi8_r", RUSSIAN),
        ("iso-8859-2", "iso8859_2", "Zażółć gęślą jaźń"),
        ("iso-8859-8-i", "iso8859_8", "שלום עולם לכולם"),
        ("x-mac-cyrillic", "mac_cyrillic", RUSSIAN),
        ("iso-2022-jp", "iso2022_jp", "日本語のテキスト"),
    ],
)
def test_labels_mean_what_browsers_take_them_for(label: str, codec: str, text: str) -> None:
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


def test_decoders_have_characters_that_pythons_lack() -> None:
    assert decode(b"<p>\xad\xa1\xad\xea\xfc\xe2\xb9\xe2</p>", f"{HTML}; charset=euc-jp") == "<p>①㈱髙高</p>"
    assert decode(b"<p>\x80 10 \xd6\xd0\xce\xc4\xca\xc7</p>", f"{HTML}; charset=gb2312") == "<p>€ 10 中文是</p>"
    controls = decode(b"\x81\x8d\x8f\x90\x9d" + b"\xe9" * 100, f"{HTML}; charset=iso-8859-1")
    assert controls == "\x81\x8d\x8f\x90\x9d" + "é" * 100


@pytest.mark.parametrize(
    ("start", "content_type", "codec"),
    [
        ("<!-- <meta charset=utf-8> --><meta charset=koi8-r>", HTML, "koi8_r"),
        ("<meta name=x content='text/html; charset=utf-8'><meta charset=koi8-r>", HTML, "koi8_r"),
        ("<meta charset=no-such-thing><meta charset=koi8-r>", HTML, "koi8_r"),
        ("<meta charset=koi8-r>", f"{HTML}; charset=utf-7", "koi8_r"),  # a trap, not a label of the web
        ("<meta charset=windows-1252>", f"{HTML}; charset=koi8-r", "koi8_r"),
        ("<?xml version='1.0' encoding='windows-1252'?><meta charset=koi8-r>", HTML, "koi8_r"),
        ("<?xml version='1.0' encoding='koi8-r'?><meta charset=windows-1252>", "application/xhtml+xml", "koi8_r"),
        ("<meta charset=windows-1252>", f"text/plain; charset={'koi8-r'}", "koi8_r"),
        ("<meta charset=windows-1252>", "text/plain", "koi8_r"),  # no <meta> in plain text: detected
        ("<meta charset=utf-16>", HTML, "utf-8"),
        ('<?xml version="1.0" encoding="UTF-16"?>', HTML, "utf-8"),
        ("<meta charset=koi8-r>", f"{HTML}; charset=koi8-r", "utf-8-sig"),
        ("<meta charset=koi8-r>", f"{HTML}; charset=koi8-r", "utf-16"),
        ("<meta charset=koi8-r>", HTML, "utf-16-be"),
        ("", f"{HTML}; charset=utf-8", "utf-16-le"),
        ("", f"{HTML}; charset=utf-16", "utf-16-le"),
        ("<p>", f"{HTML}; charset=utf-8", "iso2022_jp"),
    ],
)
def test_the_stronger_evidence_wins(start: str, content_type: str, codec: str) -> None:
    text = f"{start}<p>{JAPANESE[:8] if codec == 'iso2022_jp' else RUSSIAN}</p>"
    assert decode(text.encode(codec), content_type) == text


@pytest.mark.parametrize("declared", ["", "; charset=utf-8", "; charset=no-such-thing"])
@pytest.mark.parametrize("start", ["<p>", "<!DOCTYPE html>" + "<p>plain</p>" * 2000])
def test_windows_1252_is_found_where_the_page_says_nothing_or_utf8(start: str, declared: str) -> None:
    text = f"{start}A café’s “menu” – naïve, isn’t it?"
    assert decode(text.encode("cp1252"), HTML + declared) == text
    assert decode(f"{start}It’s plain".encode("cp1252"), HTML + declared) == f"{start}It’s plain"


@pytest.mark.parametrize("declared", ["", "; charset=utf-8", "; charset=iso-8859-1"])
def test_valid_utf8_wins_over_a_declaration(declared: str) -> None:
    assert decode(GERMAN.encode(), HTML + declared) == GERMAN
    assert decode("one café".encode(), HTML + declared) == "one café"
    assert decode("wrong � before".encode(), HTML + declared) == "wrong � before"


@pytest.mark.parametrize("declared", ["", "; charset=utf-8"])
def test_one_bad_byte_or_a_truncated_end_does_not_change_the_encoding_of_a_page(declared: str) -> None:
    assert decode(b"\xc3\xa9t\xc3\xa9 " * 200 + b"\xe9 ", HTML + declared) == "été " * 200 + "\ufffd "
    assert decode("été".encode() + b"\xff!", HTML + declared) == "été\ufffd!"
    assert decode(RUSSIAN.encode()[:40] + b"\xd0", HTML + declared).endswith("\ufffd")
    assert decode("è “".encode()[:-1], HTML + declared) == "è \ufffd"
    assert decode(b"caf\xe9", HTML + declared) == "café"  # no other evidence for UTF-8
    cut = f"<p>{JAPANESE}".encode("cp932")[:-1]
    assert decode(cut, f"{HTML}; charset=shift_jis") == f"<p>{JAPANESE[:-1]}\ufffd"


def test_a_declaration_that_the_bytes_contradict_is_not_believed() -> None:
    czech = "Příliš žluťoučký kůň úpěl ďábelské ódy, šťastně žil a žije. " * 3
    assert decode(czech.encode("cp1250"), f"{HTML}; charset=iso-8859-2", "https://one.cz/") == czech
    japanese = f"<p>{JAPANESE}ひらがなとカタカナの文章です。</p>" * 3
    assert decode(japanese.encode("cp932"), f"{HTML}; charset=iso-8859-1") == japanese
    assert decode(b"<p>plain ASCII", f"{HTML}; charset=utf-16") == "<p>plain ASCII"
    assert decode("표".encode("cp949"), f"{HTML}; charset=euc-kr") == "표"  # two bytes that are also valid UTF-8


def test_an_encoding_that_browsers_refuse_gives_no_text() -> None:
    assert decode(b"<p>~{VPND~}</p>", f"{HTML}; charset=hz-gb-2312") == "\ufffd"
    assert decode(b"<meta charset=iso-2022-kr><p>x</p>", HTML) == "\ufffd"


@pytest.mark.parametrize("codec", ["cp1251", "koi8_r", "iso8859_5", "cp866"])
def test_an_undeclared_encoding_is_detected(codec: str) -> None:
    assert decode(RUSSIAN.encode(codec), HTML) == RUSSIAN


@given(st.binary(max_size=300), st.text(max_size=20), st.text(max_size=20))
def test_any_bytes_with_any_header_and_url_can_be_decoded(body: bytes, label: str, host: str) -> None:
    for start in (b"", b"<meta charset=big5>", b"\x1b$B", b"<\0"):
        decode(start + body, f"{HTML}; charset={label}", f"http://{host}.{host}/").encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("name", ["trafilatura", "newspaper3k"])
@pytest.mark.parametrize("kind", [HTML, "application/xhtml+xml"])
def test_extractors_read_pages_with_an_xml_declaration(name: str, kind: str) -> None:
    story = f"“{prose(1, 120)}” – naïve, isn’t it?"
    page = '<?xml version="1.0" encoding="windows-1252"?>\n<!DOCTYPE html><html xmlns="http://www.w3.org/1999/xhtml">'
    page += (
        f"<head><title>A café’s menu</title></head><body><article><p>{story}</p><p>{story}</p></article></body></html>"
    )
    found = extract(page.encode("cp1252"), kind, "https://one.example/", load_extractors([name]))
    assert story in found.text and found.title == "A café’s menu"


# Python's codec, the label that pages use
ENCODINGS = [
    *[("utf-8", "utf-8"), ("utf-8-sig", ""), ("utf-16", ""), ("utf-16-le", "utf-16"), ("utf-16-be", "utf-16be")],
    *[(f"cp{number}", f"windows-{number}") for number in (1250, 1251, 1252, 1253, 1254, 1255, 1256, 1257)],
    *[(f"iso8859_{number}", f"iso-8859-{number}") for number in (2, 5, 7, 10, 13, 15, 16)],
    *[("koi8_r", "koi8-r"), ("cp866", "ibm866"), ("mac_roman", "macintosh"), ("cp874", "windows-874")],
    *[("cp932", "shift_jis"), ("euc_jp", "euc-jp"), ("gbk", "gbk"), ("gb18030", "gb18030"), ("cp949", "euc-kr")],
]


def test_real_pages_keep_their_characters_in_every_encoding(shared_data: Path) -> None:
    articles = read_articles(shared_data / "articles")
    pages = [(article.url, undeclared(article.body)) for article in articles if len(article.body) < 60_000][::3]
    for codec, label in ENCODINGS:
        lost = characters = 0
        for url, text in pages:
            page = text.encode(codec, "xmlcharrefreplace").decode(codec)
            counts = lost_characters(page, decode(page.encode(codec), f"{HTML}; charset={label}", url))
            lost, characters = lost + counts[0], characters + counts[1]
        # euc-jp: Python's own codec reads £ where browsers read ￡
        assert lost <= (0.03 if codec == "euc_jp" else 0) * characters, (codec, lost, characters)


def test_real_pages_in_windows_1252_keep_their_characters_undeclared_or_declared_as_utf8(shared_data: Path) -> None:
    lost: list[str] = []
    articles = read_articles(shared_data / "articles")[::4]
    for article in articles:
        page = undeclared(article.body).encode("cp1252", "xmlcharrefreplace").decode("cp1252")
        for declared in ("", "; charset=utf-8"):
            if lost_characters(page, decode(page.encode("cp1252"), HTML + declared, article.url))[0]:
                lost.append(article.url)
    assert len(lost) <= 0.06 * len(articles), lost  # pages in another script, whose letters become &#…;


def test_every_encoding_of_the_standard_has_a_decoder() -> None:
    for name in "ibm866 iso-8859-3 iso-8859-8-i koi8-u windows-1258 gb18030 x-mac-cyrillic x-user-defined".split():
        assert decode(b"<p>abc", f"{HTML}; charset={name}") == "<p>abc", name
        assert codecs.lookup(f"whatwg-{name}")
