import re
from typing import get_args

import pytest
from lxml.etree import tostring
from trafilatura import load_html

from common.errors import PageError
from common.settings import ScrapeSettings
from corpus.extract.extractors import (
    MAX_TAGS,
    Extracted,
    Extractor,
    HtmlPage,
    extract,
    load_extractors,
    without_boilerplate,
)
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
    extracted = extract(html.encode(), "text/html; charset=utf-8", URL, extractors)
    assert (
        extracted.extractor == name
        and extracted.title.startswith("A title of its own")
        and extracted.date == "2019-01-10"
    )
    assert all(paragraph in extracted.text for paragraph in paragraphs)
    for noise in ("Contact", "Most read", "Another story", "Privacy", "dataLayer", "Unseen"):
        assert noise not in extracted.text
    partial = html.replace("2019-01-10", "May 2019")  # a date is never completed from today's
    assert extract(partial.encode(), "text/html", URL, extractors).date in ("", "2019-05-01")
    bare = extract(f"<p>{paragraphs[0]}".encode(), "text/html", URL, extractors)
    assert bare.text == paragraphs[0], "a body may begin without <html>"
    page = HtmlPage(html, URL)
    before = tostring(page.tree)
    assert extractors[0](page) == extractors[0](page) == extracted and tostring(page.tree) == before


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
    extracted = extract(html.encode(), "text/html", URL, load_extractors(["resiliparse"]))
    assert extracted.title == "A title of its own" and extracted.date == ""
    assert (
        prose(3, 80) in extracted.text and "A picture" not in extracted.text and "First comment" not in extracted.text
    )


SENTENCES = [prose(seed, 40) for seed in range(12)]  # of 200 characters or so each
MENU = "".join(f'<li><a href="/{n}">{name}</a></li>' for n, name in enumerate("Home News Sport Weather".split()))
POINTER = '<p>Read more: <a href="/other">Another story that you may like even better</a></p>'
NOISE = ("Weather", "Another story", "All rights reserved", "cookies", "First comment", "Unseen")
HEADLINE = "A headline of its own"


def page(body: str) -> str:
    """A page of a site with the usual things around its `body`."""
    return f"""<!DOCTYPE html><html lang="en"><head><title>{HEADLINE} | The Daily</title>
<script>var text = "{prose(99, 60)}";</script></head><body><nav><ul>{MENU}</ul></nav>{body}
<footer><p>Copyright 2024 The Daily. All rights reserved. We use cookies.</p></footer></body></html>"""


def paragraphs(*numbers: int) -> str:
    return "\n".join(f"<p>{SENTENCES[number]}</p>" for number in numbers)


def test_a_paragraph_that_is_mostly_a_link_is_removed_and_one_with_links_is_kept() -> None:
    paragraphs = [
        'Read more: <a href="/">All that is known</a> / <a>about it</a>',
        f"{'a' * 99}<a>{'b' * 201}</a>",  # over two thirds
        f"{'c' * 100}<a>{'d' * 200}</a>",
        " ".join(SENTENCES[:3]),
    ]
    plain = [re.sub("<[^>]+>", "", paragraph) for paragraph in paragraphs]
    body = load_html(page("".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)))
    text = "\n".join(plain[2:])
    assert without_boilerplate("\n".join(plain), "", body) == text
    assert (
        without_boilerplate(f"{HEADLINE}\n{text}\n{HEADLINE}", f"{HEADLINE} | The Daily", body) == f"{text}\n{HEADLINE}"
    )
    for start, kept in (("t" * 302, "t" * 302), ("t" * 301, "t" * 301 + "\n" + plain[1])):  # half must be left
        assert without_boilerplate(f"{start}\n{plain[1]}", "", body) == kept


MORE = f"<div class='entry'><h2>Another story</h2>{paragraphs(*range(4, 8))}</div>" * 14
LAYOUTS = {
    "blog with comments": f"""<article class="post"><header><h1>{HEADLINE}</h1></header>
<div class="entry-content">{paragraphs(0, 1, 2)}{POINTER}{paragraphs(3)}</div></article>
<section id="comments"><ol><li class='comment'><p>First comment. {SENTENCES[4]}</p></li></ol></section>""",
    "documentation": f"""<div class="document"><main role="main"><h1>{HEADLINE}</h1>{paragraphs(0)}
<div hidden><p>Unseen. {SENTENCES[4]}</p></div><template><p>Unseen. {SENTENCES[5]}</p></template>
<h2>Installing it</h2>{paragraphs(1)}<pre><code>def main():\n    return 42</code></pre><h2>Using it</h2>
{paragraphs(2, 3)}</main></div>""",
    "other stories below": f"""<main><article class='article-content'>{paragraphs(0, 1, 2, 3)}</article>
<div class='more-stories'>{MORE}</div></main>""",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_extractors_keep_the_article_of_every_layout_and_nothing_else(layout: str) -> None:
    extractors = load_extractors(ScrapeSettings().extractors)
    html = page(LAYOUTS[layout]).encode()
    extracted = extract(html, "text/html; charset=utf-8", URL, extractors)
    assert all(sentence in " ".join(extracted.text.split()) for sentence in SENTENCES[:4])
    assert not [noise for noise in NOISE if noise in extracted.text]
    assert HEADLINE in extracted.title and HEADLINE not in extracted.text
    assert ("\n    return 42\n" in extracted.text) is (layout == "documentation")


def test_lists_in_tables_survive() -> None:
    hours = """<table><tr><th>Day</th><th>Open</th></tr><tr><td>Monday <ul><li>10 to 12 <i>AM</i></li><li>
<a href="/later">2 to 8 PM</a></li></ul> as always</td><td>yes</td></tr></table>"""
    html = page(f"<article>{paragraphs(0, 1)}{hours}{paragraphs(2, 3)}</article>").encode()
    text = extract(html, "text/html", URL, load_extractors(["trafilatura"])).text
    assert "| Monday 10 to 12 AM 2 to 8 PM as always | yes |" in text
