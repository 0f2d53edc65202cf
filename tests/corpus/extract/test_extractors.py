from typing import get_args

import pytest
from lxml.etree import tostring

from common.errors import PageError
from common.settings import ScrapeSettings
from corpus.extract.extractors import MAX_TAGS, Extracted, Extractor, HtmlPage, extract, load_extractors
from tests.helpers import prose
from workflow.demo.pages import Host, page_html

HOST = Host("one.example", "The One", "A site of sorts", ("Home", "Contact"), "blog")
(CHOICE,) = get_args(ScrapeSettings.model_fields["extractors"].annotation)
URL = "https://one.example/a"
HIDDEN = ("p hidden", "template", "p style='color: red;\n DISPLAY : None'")


@pytest.mark.parametrize("name", get_args(CHOICE))
def test_each_extractor_finds_the_article_without_its_surroundings_and_does_not_change_the_page(name: str) -> None:
    paragraphs = [prose(seed, 120) for seed in range(4)]
    html = page_html(HOST, "A title of its own", "\n\n".join(paragraphs), number=3, related=["Another story"])
    hidden = "".join(f"<{tag}>Unseen. {prose(7, 40)}</{tag.split()[0]}>" for tag in HIDDEN)
    html = html.replace(paragraphs[2], f"{paragraphs[2]}</p>{hidden}<p>")
    extractors = load_extractors([name])
    found = extract(html.encode(), "text/html; charset=utf-8", URL, extractors)
    assert found.extractor == name and found.title.startswith("A title of its own") and found.date == "2019-01-10"
    assert all(paragraph in found.text for paragraph in paragraphs)
    for noise in ("Contact", "Most read", "Another story", "Privacy", "dataLayer", "Unseen"):
        assert noise not in found.text
    partial = html.replace("2019-01-10", "May 2019")  # a date is never completed from today's
    assert extract(partial.encode(), "text/html", URL, extractors).date in ("", "2019-05-01")
    bare = extract(f"<p>{paragraphs[0]}".encode(), "text/html", URL, extractors)
    assert bare.text == paragraphs[0], "a body may begin without <html>"
    page = HtmlPage(html, URL)
    before = tostring(page.tree)
    assert extractors[0](page) == extractors[0](page) == found and tostring(page.tree) == before


def test_the_first_extractor_that_finds_text_wins() -> None:
    asked: list[int] = []

    def answer(number: int, text: str | None) -> Extractor:
        def run(page: HtmlPage) -> Extracted | None:
            asked.append(number)
            if text == "fails":
                raise RecursionError
            return None if text is None else Extracted(text, "", "", f"x{number}")

        return run

    def answers(*texts: str | None) -> tuple[str, list[int]]:
        asked.clear()
        extractors = [answer(number, text) for number, text in enumerate(texts)]
        return extract(body, "text/html", URL, extractors).extractor, asked[:]

    body, article = b"<p>A page.</p>", prose(1, 60)
    assert answers(article[:10], article) == ("x0", [0])
    assert answers("fails", None, "  \n", article, article) == ("x3", [0, 1, 2, 3])
    for texts, reason in (((None, "  \n"), "extract_empty"), (("fails",), "extract_error")):
        with pytest.raises(PageError, match=reason):
            answers(*texts)
    assert extract(b"<p>" + b"<" * (MAX_TAGS - 1), "text/html", URL, [answer(0, article)]).text == article
    with pytest.raises(PageError, match="too_many_tags"):
        extract(b"<p>" + b"<" * MAX_TAGS, "text/html", URL, [answer(0, article)])
    plain = extract(b"  <b>not HTML</b>\r\n\x00", "text/plain; charset=utf-8", URL, [])
    assert (plain.text, plain.extractor) == ("  <b>not HTML</b>\r\n", "plain")


def test_text_and_title_that_resiliparse_finds_are_those_of_the_page_without_comments_and_texts_of_images() -> None:
    article = "".join(f"<p>{prose(seed, 80)}</p>" for seed in range(4))
    html = f"""<html><head><title> A title\n of its own </title></head><body><article>{article}
<img src="x" alt="A picture">
<section id="comments" class="comments"><p>First comment. {prose(9, 60)}</p></section></article></body></html>"""
    found = extract(html.encode(), "text/html", URL, load_extractors(["resiliparse"]))
    assert found.title == "A title of its own" and found.date == ""
    assert prose(3, 80) in found.text and "A picture" not in found.text and "First comment" not in found.text
