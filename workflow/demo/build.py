"""Build the demo site: articles on several hosts, and pages and URLs for every branch of the DAG.

    python -m workflow.demo.build --output results/demo/site
    python -m workflow.demo.serve --site results/demo/site

The bytes depend only on the versions of Python and of the libraries whose documentation is read.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from common import cli
from common.errors import InputError
from common.files import short_hash
from workflow.demo.articles import python_articles
from workflow.demo.pages import Host, odd_pages, odd_urls, page_html
from workflow.demo.serve import Page, write_site

HOSTS = (
    Host(
        "handbook.example", "The Handbook", "A reference for patient readers", ("Contents", "Index", "Search"), "main"
    ),
    Host("docs.language.example", "Language Docs", "", ("Tutorial", "Reference", "Library", "FAQ"), "divs"),
    Host("blog.weekly.example", "Weekly Notes", "What we learned this week", ("Home", "Archive", "Feed"), "blog"),
    Host("www.library.example", "Open Library", "Everything explained", ("Catalogue", "Opening hours"), "main"),
    Host("notes.garden.example", "Garden of Notes", "Written down before I forget", ("Now", "Then", "Links"), "blog"),
    Host("wiki.commons.example", "Commons Wiki", "", ("Main page", "Recent changes", "Random page"), "divs"),
)
_MIRROR = Host("mirror.copies.example", "The Mirror", "Seen elsewhere", ("Home", "Sources"), "divs")
_COPIES = 8  # of each kind: exact and near duplicates
_EDIT_EVERY = 60  # words between two edits of a near duplicate: about 3 % of the 5-grams, Jaccard about 0.95
_RELATED = 5  # links in a sidebar


def build_site(articles: Mapping[str, str], folder: Path) -> None:
    """Write a site of articles (text by title) for `workflow.demo.serve`.

    A hash of the titles shuffles the articles, so that the validation split has the same
    distribution. Raises InputError if there are none.
    """
    if not articles:
        raise InputError("a site needs at least one article")
    shuffled = sorted(articles.items(), key=lambda article: short_hash(article[0]))
    listed = list(_article_pages(shuffled))
    odd = list(odd_pages(shuffled))
    urls = [*(page.url for page in listed), *odd_urls(odd)]
    first = urls[0]
    # the first page again: the same URL, with www. and a fragment, with tracking parameters
    urls += [first, first.replace("https://", "http://www.", 1) + "#top", first + "?utm_source=feed&utm_medium=rss"]
    write_site(folder, [*listed, *odd], urls)


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60]


def _article_pages(articles: Sequence[tuple[str, str]]) -> Iterator[Page]:
    """Every article, spread over the hosts; then exact and edited copies on another host."""
    titles = [title for title, _ in articles]
    for number, (title, text) in enumerate(articles):
        host = HOSTS[number % len(HOSTS)]
        related = [titles[(number + step) % len(titles)] for step in range(1, _RELATED + 1)]
        html = page_html(host, title, text, number=number, related=related)
        yield Page(f"https://{host.name}/{number:03d}-{_slug(title)}", html.encode())
    for number, (title, text) in enumerate(articles[:: max(1, len(articles) // _COPIES)][:_COPIES]):
        copy = page_html(_MIRROR, title, text, number=number)
        yield Page(f"https://{_MIRROR.name}/copied/{number:03d}-{_slug(title)}", copy.encode())
        edit = page_html(_MIRROR, title, edited(text), number=number)
        yield Page(f"https://{_MIRROR.name}/edited/{number:03d}-{_slug(title)}", edit.encode())


def edited(text: str) -> str:
    """The text with one word in sixty replaced: a near duplicate."""
    words = re.split(r"(\s+)", text)  # words at even positions, white space at odd ones
    for position in range(2 * (_EDIT_EVERY // 2), len(words), 2 * _EDIT_EVERY):
        if words[position].isalpha():
            words[position] = "indeed"
    return "".join(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("workflow.demo.build", __doc__)
    parser.add_argument("--output", type=cli.output_folder, required=True, metavar="DIR", help="folder of the site")
    arguments = parser.parse_args(argv)
    articles = python_articles()
    build_site(articles, arguments.output)
    print(f"{arguments.output}: a site of {len(articles)} articles; its URL list is {arguments.output / 'urls.txt'}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
