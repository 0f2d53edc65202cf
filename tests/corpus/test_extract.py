import pytest

from corpus.extract import Extracted, NothingExtracted, decode, extract, load_extractors
from demo.pages import Host, page_html
from tests.helpers import prose

HOST = Host("one.example", "The One", "A site of sorts", ("Home", "Contact"), "blog")
UMLAUTS = "Größe, Übermut und Straße – für alle „Fälle“"


def found(text: str, name: str) -> Extracted:
    return Extracted(text, "", "", name)


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        (UMLAUTS.encode("cp1252"), "text/html; charset=windows-1252", UMLAUTS),
        (UMLAUTS.encode("cp1252"), "text/html; charset=ISO-8859-1", UMLAUTS),  # as browsers read that label
        (f'<meta charset="windows-1252">{UMLAUTS}'.encode("cp1252"), "text/html", None),
        (f"<meta http-equiv=c content='text/html; charset=koi8-r'>{'привет'}".encode("koi8-r"), "text/html", None),
        (UMLAUTS.encode(), "text/html", UMLAUTS),
        (UMLAUTS.encode(), "text/html; charset=no-such-thing", UMLAUTS),
        (UMLAUTS.encode("utf-16"), "text/html", UMLAUTS),
        (b"\xef\xbb\xbf" + UMLAUTS.encode(), "text/html; charset=latin-1", UMLAUTS),  # a byte-order mark wins
        (b"+ADw-script+AD4-", "text/html; charset=utf-7", "+ADw-script+AD4-"),  # a trap, not a web charset
    ],
)
def test_the_character_set_comes_from_mark_header_or_meta(body: bytes, content_type: str, expected: str | None) -> None:
    text = decode(body, content_type)
    if expected is None:
        assert ("Größe" in text and "„Fälle“" in text) or "привет" in text
    else:
        assert text == expected


def test_an_undeclared_character_set_is_detected() -> None:
    russian = "Каждый охотник желает знать, где сидит фазан, и никто ему об этом не говорит. " * 5
    assert decode(russian.encode("windows-1251"), "text/html") == russian


def test_one_bad_byte_does_not_change_the_character_set_of_a_page() -> None:
    text = decode(b"\xc3\xa9t\xc3\xa9 " * 200 + b"\xe9", "text/html; charset=utf-8")
    assert text == "été " * 200 + "\ufffd"


@pytest.mark.parametrize("name", ["trafilatura", "newspaper3k"])
def test_each_extractor_finds_the_article_and_leaves_out_what_surrounds_it(name: str) -> None:
    paragraphs = [prose(seed, 120) for seed in range(4)]
    html = page_html(HOST, "A title of its own", "\n\n".join(paragraphs), number=3, related=["Another story"])
    page = extract(html.encode(), "text/html; charset=utf-8", "https://one.example/a", load_extractors([name]), 200)
    assert page.extractor == name and page.title.startswith("A title of its own") and page.date == "2019-01-10"
    for paragraph in paragraphs:
        assert paragraph in page.text
    for noise in ("Contact", "Most read", "Another story", "Privacy", "dataLayer"):
        assert noise not in page.text


def test_the_first_good_answer_wins_else_the_longest() -> None:
    def answers(*texts: str | None) -> Extracted:
        extractors = [lambda html, url, t=t, n=n: t and found(t, f"x{n}") for n, t in enumerate(texts)]
        return extract(b"<p>page</p>", "text/html", "http://one.example/", extractors, min_extracted=10)

    assert answers("long enough text", "an even longer text").extractor == "x0"
    assert answers("short", "long enough text").extractor == "x1"
    assert answers("short", None, "shorter", " ").extractor == "x2"
    with pytest.raises(NothingExtracted, match="extract_empty"):
        answers(None, "  \n")


def test_an_extractor_that_fails_gives_way_to_the_next() -> None:
    def fails(html: str, url: str) -> Extracted:
        raise RecursionError

    page = extract(b"<p>x</p>", "text/html", "http://one.example/", [fails, lambda h, u: found("text", "next")], 1)
    assert page.extractor == "next"
    with pytest.raises(NothingExtracted, match="extract_error"):
        extract(b"<p>x</p>", "text/html", "http://one.example/", [fails], 1)


def test_plain_text_is_taken_as_it_is() -> None:
    body = "  <b>not HTML</b>\r\n\tcafé\x00".encode()
    page = extract(body, "text/plain; charset=utf-8", "http://one.example/", [], 200)
    assert (page.text, page.extractor) == ("  <b>not HTML</b>\r\n\tcafé", "plain")
    with pytest.raises(NothingExtracted, match="extract_empty"):
        extract(b" \n", "text/plain", "http://one.example/", [], 0)


@pytest.mark.parametrize("name", ["trafilatura", "newspaper3k"])
def test_text_is_always_valid_utf8_without_nul(name: str) -> None:
    entities = "&#0; &#xD800; &#x1F600;" + f"<p>{prose(5)}</p>" * 3 + "<p>\x00 end</p>"
    html = f"<html><body><article><h1>Title \x00</h1>{entities}</article></body></html>"
    page = extract(html.encode(), "text/html", "https://one.example/a", load_extractors([name]), 1)
    assert "\x00" not in page.text + page.title
    page.text.encode("utf-8")
