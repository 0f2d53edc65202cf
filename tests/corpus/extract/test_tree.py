import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.settings import ScrapeSettings
from corpus.extract.extractors import HtmlPage, extract, load_extractors
from tests.helpers import prose

URL = "https://one.example/a"
P = [prose(seed, 60) for seed in range(8)]
CODE = "def main():\n    if True:\n\n        return {'a': 1}"
LINES = [line for line in CODE.split("\n") if line]  # blank lines go


def text_of(body: str, title: str = "The title") -> str:
    """What the default extractors find in a page."""
    html = f"<html><head><title>{title}</title></head><body>{body}</body></html>"
    return extract(html.encode(), "text/html; charset=utf-8", URL, load_extractors(ScrapeSettings().extractors)).text


def docbook(name: str, heading: str, content: str, level: int = 2) -> str:
    """A section of DocBook: each heading has an anchor, in three divisions of its own."""
    title = f'<h{level} class="title"><a id="{name}"></a>{heading}</h{level}>'
    return f'<div class="section"><div class="titlepage"><div><div>{title}</div></div></div>{content}</div>'


def test_headings_are_lines_of_their_own_in_a_page_without_the_elements_of_news_sites() -> None:
    sections = [docbook(f"s{n}", f"{n}. A question?", f"<p>{P[n]}</p>", level=2 + n % 3) for n in range(4)]
    menu = (
        '<table class="nav"><tr><td><a href="/prev">Previous page</a></td><td><a href="/n">Next</a></td></tr></table>'
    )
    lines = text_of(f'{menu}<div class="chapter">{"".join(sections)}</div>{menu}').split("\n")
    assert lines == [line for n in range(4) for line in (f"{n}. A question?", P[n])]
    loose = "".join(f"<h2>Part {n}</h2><p>{P[n]}</p>" for n in range(4))
    for page in (loose, f"<div id='main-nav'><a href='/'>Home</a></div><div>{loose}</div>"):
        assert text_of(page).split("\n") == [line for n in range(4) for line in (f"Part {n}", P[n])]
    assert extract(loose.encode(), "text/html", URL, load_extractors(["trafilatura"])).text.startswith("Part 0\n")


def test_a_section_whose_id_repeats_its_heading_is_no_menu_and_no_share_button() -> None:
    for name, heading in (
        ("menus", "9.6. Menus"),
        ("s-sharing-files", "Sharing files"),
        ("for-authors", "Notes for authors"),
    ):
        section = (
            f'<section id="{name}"><h2>{heading}<a class="headerlink" href="#{name}">¶</a></h2><p>{P[1]}</p></section>'
        )
        text = text_of(f'<div class="body" role="main"><p>{P[0]}</p>{section}<p>{P[2]} {P[3]}</p></div>')
        assert text.split("\n") == [P[0], heading, P[1], f"{P[2]} {P[3]}"]
    share = f'<div id="share"><h4>Menu</h4><p>{P[1]}</p></div>'
    assert P[1] not in text_of(f'<div class="body" role="main"><p>{P[0]}</p>{share}<p>{P[2]} {P[3]} {P[4]}</p></div>')


@given(st.lists(st.sampled_from([" ", "\n", "\t", "\r\n  ", "\n\n"]), min_size=11, max_size=11))
def test_white_space_is_folded_outside_of_code(gaps: list[str]) -> None:
    words = "one two three four five six seven eight nine ten eleven twelve".split()
    wrapped = "".join(f"{word}{gap}" for word, gap in zip(words, ["\n", *gaps], strict=True)).strip()
    inline = wrapped.replace("five", "<b>five</b>").replace("seven", "<code>seven</code>")
    kept = (
        "<pre>{}</pre>",
        "<div><code>{}</code></div>",
        "<div style='White-Space: pre-wrap'>{}</div>",
        "<textarea>{}</textarea>",
    )
    for place in ("<p>{}</p>", "<ul><li>{}</li></ul>", "<p>a <code>{}</code></p>", "<td>{}</td>"):
        text = visible(place.format(inline))
        assert " ".join(words) in text
    for place in kept:
        assert wrapped.replace("\r\n", "\n") in visible(place.format(wrapped))


def visible(body: str) -> str:
    return str(HtmlPage(f"<html><body>{body}</body></html>", URL).prepared.text_content())


@pytest.mark.parametrize(
    "place",
    [
        "<pre>{}</pre>",
        "<div class='highlight'><pre><span class='k'>{}</span></pre></div>",
        "<div><code>{}</code></div>",
        "<ul><li>An item:<pre>{}</pre></li></ul>",
        "<ol><li><p>An item:</p><ul><li><div><pre>{}</pre></div></li></ul></li></ol>",
        "<dl><dt>A term</dt><dd>Its meaning:<pre>{}</pre>and more.</dd></dl>",
        "<table><tr><td>1</td><td><pre>{}</pre></td></tr></table>",
    ],
)
def test_code_keeps_its_lines_wherever_it_stands(place: str) -> None:
    text = text_of(f"<h2>Before</h2><p>{P[0]}</p>{place.format(CODE)}\n<h3>After</h3><p>{P[1]} {P[2]} {P[3]}</p>")
    lines = text.split("\n")
    start = lines.index(LINES[0])
    assert lines[start : start + len(LINES)] == LINES
    assert lines[:2] == ["Before", P[0]] and lines[-2:] == ["After", f"{P[1]} {P[2]} {P[3]}"]


def test_lists_keep_their_terms_items_and_paragraphs() -> None:
    dl = f"<dl><dt><a name='x'></a>-v</dt><dd>{P[0]}</dd><dt>-q</dt><dd><p>{P[1]}</p><p>{P[2]}</p></dd></dl>"
    lines = text_of(f"<p>{P[3]} {P[4]}</p>{dl}").split("\n")
    assert lines == [f"{P[3]} {P[4]}", "- -v", f"- {P[0]}", "- -q", f"- {P[1]} {P[2]}"]
    code = dl.replace("</dl>", "<dt>-x</dt><dd>run <b>it</b>: <pre>a\nb</pre> now</dd></dl>")
    lines = text_of(f"<p>{P[3]} {P[4]}</p>{code}").split("\n")
    assert lines[1:] == ["- -v", f"- {P[0]}", "- -q", f"- {P[1]}", P[2], "- -x", "- run it:", "a", "b", "now"]


def test_words_that_a_manual_marks_stay_in_their_sentence() -> None:
    label = '<span class="guimenu">Views</span>'
    code = "<code>pkg=<em class='replaceable'><code>version</code></em></code>"
    text = text_of(f"<h2>Use</h2><p>Choose {label} to see {code} at the end. {P[0]}</p><p>{P[1]} {P[2]} {P[3]}</p>")
    assert f"Choose Views to see pkg=version at the end. {P[0]}" in text


def test_the_title_is_removed_unless_it_is_the_heading_of_a_section() -> None:
    rest = f"<p>{P[0]} {P[1]}</p><h2>More</h2><p>{P[2]} {P[3]}</p>"
    for level, kept in ((1, False), (2, True), (3, True)):
        text = text_of(f"<h{level}>Kernels</h{level}>{rest}", "Kernels - The Handbook")
        assert text.startswith("Kernels\n") is kept and "More\n" in text


def test_a_page_with_very_many_paragraphs_has_no_frame_which_would_take_quadratic_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = HtmlPage("<html><body>" + f"<p>{P[0]}</p>" * 9 + "</body></html>", URL)
    for most, frames in ((9, 1), (8, 0)):
        monkeypatch.setattr("corpus.extract.tree._MAX_PARAGRAPHS", most)
        assert len(page.prepared.find_class("post")) == frames


BODIES: dict[str, Callable[[int], str]] = {
    "anchors": lambda n: "<p>" + "<a name=x>a</a> " * n,
    "headings": lambda n: f"<div id='{'a ' * 5000}'>" + "<h2 id=a>a</h2>" * n,
    "list with code": lambda n: "<ul>" + "<li>a<pre>b</pre>" * n + "</ul>",
    "table with code": lambda n: "<table>" + "<tr><td>a<td><pre>b</pre>" * n + "</table>",
    "lists in a table": lambda n: "<table>" + "<tr><td><ul><li>a<li>b</ul>" * n + "</table>",
    "code": lambda n: "<div>" + "<code>a\n</code>" * n + "</div>",
    "deep": lambda n: "<div>" * 150 + "<p>a b</p>" * n,
    "styles": lambda n: "<span style='text-decoration:none'>a</span> " * n,
}


@pytest.mark.parametrize("name", BODIES)
def test_work_is_linear_in_the_size_of_a_page(name: str) -> None:
    short, long = (cpu_seconds(BODIES[name](count), lambda page: page.prepared) for count in (1_000, 8_000))
    assert long < 24 * short + 0.01  # 8 if linear, 64 if quadratic


def test_resiliparse_is_linear_in_elements_with_a_style() -> None:
    (run,) = load_extractors(["resiliparse"])
    short, long = (cpu_seconds(f"<p>{P[0]}</p>{BODIES['styles'](count)}", run) for count in (500, 4_000))
    assert long < 24 * short + 0.01


def cpu_seconds(body: str, run: Callable[[HtmlPage], object]) -> float:
    """The least of three runs."""
    page = HtmlPage(f"<html><body>{body}</body></html>", URL)
    taken = []
    for _ in range(3):
        assert page.tree is not None
        start = time.process_time()
        run(page)
        taken.append(time.process_time() - start)
    return min(taken)
