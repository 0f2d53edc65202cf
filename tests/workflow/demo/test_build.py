import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from common.errors import InputError
from corpus.extract.extractors import extract, load_extractors
from tests.conftest import ROOT
from tests.helpers import prose
from workflow.demo.articles import python_articles
from workflow.demo.build import build_site
from workflow.demo.serve import Page, read_site, write_site

ARTICLES = {f"Story {n}": "\n\n".join(prose(100 * n + part, 100) for part in range(3)) for n in range(24)}


def site(folder: Path, articles: Mapping[str, str] = ARTICLES) -> tuple[dict[str, Page], list[str]]:
    """The pages of a new site by URL, and its list of URLs."""
    build_site(articles, folder)
    return {page.url: page for page in read_site(folder)}, (folder / "urls.txt").read_text().splitlines()


def text_of(page: Page) -> str:
    kind = page.headers["Content-Type"]
    return extract(page.body, kind, page.url, load_extractors(["trafilatura"])).text


def test_every_article_is_a_page_on_one_of_several_hosts_and_some_have_copies(
    tmp_path: Path,
) -> None:
    pages, urls = site(tmp_path / "site")
    for number, text in enumerate(ARTICLES.values()):
        (url,) = [url for url in urls[:24] if re.search(rf"example/\d{{3}}-story-{number}$", url)]
        found = text_of(pages[url])
        assert all(paragraph in found for paragraph in text.split("\n\n")), number
        assert "Privacy" not in found and "Most read" not in found
    assert len({urlsplit(url).hostname for url in pages}) == 8
    numbers = [int(found[1]) for url in urls[:24] if (found := re.search(r"-story-(\d+)$", url))]
    assert sorted(numbers) == list(range(24))
    assert numbers not in (sorted(numbers), sorted(numbers, key=str)), "nor of their titles"
    _, again = site(tmp_path / "other", dict(reversed(ARTICLES.items())))
    assert again == urls, "not a matter of their order"
    copies = sorted(url for url in pages if "/copied/" in url)
    assert len(copies) == 8
    for url in copies:
        copied, near = text_of(pages[url]), text_of(pages[url.replace("/copied/", "/edited/")])
        original = next(text for title, text in ARTICLES.items() if url.endswith(title.lower().replace(" ", "-")))
        assert all(paragraph in copied for paragraph in original.split("\n\n"))
        a, b = ({text[n : n + 5] for n in range(len(text) - 4)} for text in (copied, near))
        assert 0.8 <= len(a & b) / len(a | b) < 1


def test_the_command_writes_the_same_bytes_every_time(tmp_path: Path) -> None:
    """Whatever the order of sets, which depends on the hash seed of the process."""
    words = [sys.executable, "-m", "workflow.demo.build", "--output", tmp_path / "a"]
    subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"}, check=True)
    build_site(python_articles(), tmp_path / "b")
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()} for name in "ab")
    assert a == b and len(a) > 2


def test_a_site_is_read_as_it_was_written_and_another_folder_is_named(tmp_path: Path) -> None:
    pages = [
        Page("https://one.example/", b"\x00\xff", 503, {"Retry-After": "1"}, 0.5),
        Page("http://two.example/ü?x=1", b"text"),
    ]
    write_site(tmp_path, pages, ["https://one.example/"])
    assert read_site(tmp_path) == pages
    assert (tmp_path / "urls.txt").read_text() == "https://one.example/\n"
    for text in ('{"format": 2}', '{"format": 1, "pages": [{"url": "http://one.example/"}]}', None):
        (tmp_path / "site.json").write_text(text) if text else (tmp_path / "site.json").unlink()
        with pytest.raises(InputError, match=r"site\.json"):
            read_site(tmp_path)
