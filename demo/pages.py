"""Renders articles as HTML pages with navigation, sidebar, comments and footer, in three layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from html import escape

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


def article_html(text: str) -> str:
    """Plain text as the HTML of an article: a paragraph per block."""
    return "\n".join(f"<p>{escape(' '.join(block.split()))}</p>" for block in text.split("\n\n"))


def page_html(
    host: Host, title: str, text: str, *, number: int = 0, related: Sequence[str] = (), language: str = "en"
) -> str:
    """A complete page. `number` selects its date and comments; `related` are the titles in its sidebar."""
    published = (date(2019, 1, 7) + timedelta(days=number)).isoformat()
    menu = "".join(f'<li><a href="/{item.lower().replace(" ", "-")}">{escape(item)}</a></li>' for item in host.menu)
    links = "".join(f'<li><a href="/archive/{n}">{escape(name)}</a></li>' for n, name in enumerate(related))
    sidebar = f"<h3>Most read on {escape(host.title)}</h3><ul>{links}</ul>"
    links_below = '<a href="/about">About</a> &middot; <a href="/privacy">Privacy</a>'
    footer = f"<p>&copy; 2019 {escape(host.title)} &middot; {links_below}</p>"
    body = article_html(text)
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
