import re
from typing import Any

import pytest
from trafilatura import load_html

from common.settings import ScrapeSettings
from corpus.extract.extractors import (
    extract,
    load_extractors,
    without_boilerplate,
)
from tests.helpers import prose

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


def tree(body: str) -> Any:
    return load_html(page(body))


def test_a_paragraph_that_is_mostly_a_link_is_removed_and_one_with_links_is_kept() -> None:
    paragraphs = [
        'Read more: <a href="/">All that is known</a> / <a>about it</a>',
        f"{'a' * 99}<a>{'b' * 201}</a>",  # over two thirds
        f"{'c' * 100}<a>{'d' * 200}</a>",
        " ".join(SENTENCES[:3]),
    ]
    plain = [re.sub("<[^>]+>", "", paragraph) for paragraph in paragraphs]
    body = tree("".join(f"<p>{paragraph}</p>" for paragraph in paragraphs))
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
    found = extract(html, "text/html; charset=utf-8", "https://daily.example/a", extractors)
    assert all(sentence in " ".join(found.text.split()) for sentence in SENTENCES[:4])
    assert not [noise for noise in NOISE if noise in found.text]
    assert HEADLINE in found.title and HEADLINE not in found.text
    assert ("\n    return 42\n" in found.text) is (layout == "documentation")


def test_lists_in_tables_survive() -> None:
    hours = """<table><tr><th>Day</th><th>Open</th></tr><tr><td>Monday <ul><li>10 to 12 <i>AM</i></li><li>
<a href="/later">2 to 8 PM</a></li></ul> as always</td><td>yes</td></tr></table>"""
    html = page(f"<article>{paragraphs(0, 1)}{hours}{paragraphs(2, 3)}</article>").encode()
    text = extract(html, "text/html", "https://daily.example/a", load_extractors(["trafilatura"])).text
    assert "| Monday 10 to 12 AM 2 to 8 PM as always | yes |" in text
