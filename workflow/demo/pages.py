"""The pages of the demo site: articles in three layouts, and a page per problem of the web."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from html import escape

from workflow.demo.serve import HTML, Page

_COMMENTS = (
    "Thanks, this cleared up a question I had been carrying around for a week.",
    "Is there an example for the older versions as well?",
    "First! Also, the second example has a typo I think.",
    "We ran into exactly this at work yesterday. Bookmarked.",
    "Could you write about performance next time?",
)


@dataclass(frozen=True)
class Host:
    """One host of the demo site: its name, titles and page layout."""

    name: str
    title: str
    tagline: str
    menu: tuple[str, ...]
    layout: str
    """`main` (semantic tags), `divs` (classes only), or `blog` (a post with comments)."""


def page_html(
    host: Host, title: str, text: str, *, number: int = 0, related: Sequence[str] = (), language: str = "en"
) -> str:
    """A complete page. `number` selects date and comments; `related` are titles in the sidebar."""
    published = (date(2019, 1, 7) + timedelta(days=number)).isoformat()
    menu = "".join(f'<li><a href="/{item.lower().replace(" ", "-")}">{escape(item)}</a></li>' for item in host.menu)
    links = "".join(f'<li><a href="/archive/{n}">{escape(name)}</a></li>' for n, name in enumerate(related))
    sidebar = f"<h3>Most read on {escape(host.title)}</h3><ul>{links}</ul>"
    links_below = '<a href="/about">About</a> &middot; <a href="/privacy">Privacy</a>'
    footer = f"<p>&copy; 2019 {escape(host.title)} &middot; {links_below}</p>"
    body = "\n".join(f"<p>{escape(' '.join(block.split()))}</p>" for block in text.split("\n\n"))
    layouts = {
        "main": f"""<header><p>{escape(host.tagline)}</p><nav><ul>{menu}</ul></nav></header>
<main><article><h1>{escape(title)}</h1>
{body}
</article></main>
<aside>{sidebar}</aside>
<footer>{footer}</footer>""",
        "divs": f"""<div class="navigation"><ul>{menu}</ul></div>
<div class="document"><div class="body" role="main"><h1>{escape(title)}</h1>
{body}
</div></div>
<div class="sidebar">{sidebar}</div>
<div class="footer">{footer}</div>""",
        "blog": f"""<div id="header"><h2><a href="/">{escape(host.title)}</a></h2>
<p>{escape(host.tagline)}</p><ul>{menu}</ul></div>
<div class="post"><h1 class="entry-title">{escape(title)}</h1>
<div class="meta">Posted on <time datetime="{published}">{published}</time> by the editors</div>
<div class="entry-content">
{body}
</div></div>
<div id="comments" class="comments">{_comments_html(number)}</div>
<div id="sidebar">{sidebar}</div>
<div id="footer">{footer}</div>""",
    }
    return f"""<!DOCTYPE html>
<html lang="{language}">
<head>
<meta charset="utf-8">
<title>{escape(title)} - {escape(host.title)}</title>
<meta property="og:title" content="{escape(title)}">
<meta property="article:published_time" content="{published}">
<script>window.dataLayer = window.dataLayer || []; dataLayer.push({{"page": {number}}});</script>
<style>body {{ font-family: sans-serif; max-width: 60em }}</style>
</head>
<body>
{layouts[host.layout]}
</body>
</html>
"""


def _comments_html(number: int) -> str:
    chosen = [_COMMENTS[(number + step) % len(_COMMENTS)] for step in range(1 + number % 3)]
    return "<h3>Comments</h3>" + "".join(
        f'<div class="comment"><p class="author">reader{number + n} wrote:</p><p>{escape(comment)}</p></div>'
        for n, comment in enumerate(chosen)
    )


# What goes wrong: a page or a URL for each problem that a crawl meets.

CORNER = Host("corner.example", "Odd Corner", "Pages that go wrong", ("Home",), "main")
_SLOW, _HANGING = 1.0, 60.0  # seconds; the second exceeds every page_timeout of a demo
_UNLISTED = ("robots.txt", "new-address")

_GERMAN = """\
Das Stadtarchiv beginnt mit der Arbeit, wenn die meisten Leute schon schlafen. Dann sind die Leitungen frei, die
Räume kühl, und niemand fragt nach einem Bauplan von 1923. Die Mitarbeiterinnen legen einen Band nach dem anderen
unter die Kamera, und am Morgen liegt ein weiteres Regal in lesbarer Form vor.

Am Anfang war die Skepsis groß. Alte Handschriften, so hieß es, könne keine Maschine entziffern, und außerdem gehe
beim Blättern zu viel verloren. Inzwischen zeigen die Zahlen ein anderes Bild: Von tausend Seiten müssen weniger als
dreißig noch einmal aufgenommen werden, und die meisten davon waren schon vorher beschädigt.

Wer heute nach seinen Vorfahren sucht, muss deshalb nicht mehr in den Lesesaal fahren. Er gibt einen Namen ein, wählt
ein Jahrzehnt und liest, was der Schreiber der Gemeinde damals notiert hat. Geblieben ist nur die Mühe mit der
Rechtschreibung, denn kaum ein Name wurde zweimal auf dieselbe Weise geschrieben."""

_MOJIBAKE = 'The café’s résumé wasn’t naïve: it listed the façade, the crème brûlée – and a piñata – as "experience".'

UNWANTED = (
    "https://handbook.example/images/cover.jpg",
    "https://www.youtube.com/watch?v=dQw4w9WgXcQ",
    "ftp://handbook.example/pub/handbook.tar",
    "http://no host.example/page",
    "http://999.999.999.999/page",
    "http://a",
    "http://127.0.0.1/admin/index",
    "http://10.0.0.7/status/page",
)


def odd_pages(articles: Sequence[tuple[str, str]]) -> Iterator[Page]:
    """The pages; their text comes from the articles (title, text)."""

    def page(
        name: str,
        body: str | bytes = b"",
        *,
        status: int = 200,
        delay: float = 0.0,
        headers: dict[str, str] | None = None,
    ) -> Page:
        raw = body.encode() if isinstance(body, str) else body
        return Page(f"https://{CORNER.name}/{name}", raw, status, headers or {"Content-Type": HTML}, delay)

    def story(name: str, text: str, *, delay: float = 0.0) -> Page:
        return page(name, page_html(CORNER, name.replace("-", " ").capitalize(), text), delay=delay)

    yield page("archiv-bei-nacht", page_html(CORNER, "Warum das Archiv nachts arbeitet", _GERMAN, language="de"))
    yield story("short-notice", "This page has moved house. Please come back next week.")
    # UTF-8 decoded as windows-1252, as after a careless import; ftfy repairs it
    yield story("careless-import", f"{_MOJIBAKE.encode().decode('cp1252')}\n\n{_retold(articles, 1)}")
    yield story("slow-server", _retold(articles, 2), delay=_SLOW)
    yield story("hanging-server", _retold(articles, 2), delay=_HANGING)
    yield page("report.html", b"%PDF-1.4\n%\xe2\xe3\n1 0 obj\n", headers={"Content-Type": "application/pdf"})
    yield page("empty", "<html><head><title>Nothing</title></head><body></body></html>")
    yield page("out-of-order", "<html><body>Service unavailable</body></html>", status=503)
    yield page("old-address", status=301, headers={"Location": "/new-address"})
    yield story("new-address", _retold(articles, 3))
    yield page("going-in-circles", status=302, headers={"Location": "/going-in-circles"})
    yield page("intranet-link", status=302, headers={"Location": "http://127.0.0.1/admin"})
    yield page("robots.txt", "User-agent: *\nDisallow: /secret/\n", headers={"Content-Type": "text/plain"})
    yield story("secret/diary", _retold(articles, 2))
    latin = page_html(CORNER, "An old page", f"Déjà vu in the café.\n\n{_retold(articles, 4)}")
    latin = latin.replace('<meta charset="utf-8">\n', "")
    old_type = {"Content-Type": "text/html; charset=ISO-8859-1"}
    yield page("old-charset", latin.encode("latin-1", "xmlcharrefreplace"), headers=old_type)
    yield page("notes", _retold(articles, 5), headers={"Content-Type": "text/plain; charset=utf-8"})


def odd_urls(pages: Sequence[Page]) -> list[str]:
    """The URLs to list: those of pages, and some that do not exist or that the blacklist drops."""
    listed = [page.url for page in pages if not page.url.endswith(_UNLISTED)]
    return [*listed, f"https://{CORNER.name}/no-such-page", *UNWANTED]


def _retold(articles: Sequence[tuple[str, str]], step: int) -> str:
    """A unique text: the first halves of two articles."""
    first = articles[step * 17 % len(articles)][1]
    second = articles[(step * 31 + 7) % len(articles)][1]
    return f"{first[: len(first) // 2]}\n\n{second[: len(second) // 2]}"
