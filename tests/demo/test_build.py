import re
from pathlib import Path
from urllib.parse import urlsplit

import ftfy
import pytest

from common.errors import InputError
from common.settings import BlacklistSettings
from corpus.extract.extractors import extract, load_extractors
from corpus.urls.rules import UrlRules
from corpus.urls.url import canonical_url
from demo.build import build_site, edited
from demo.site import Page, read_site
from tests.conftest import Command
from tests.helpers import prose

ARTICLES = {f"Story {n}": "\n\n".join(prose(100 * n + part, 100) for part in range(3)) for n in range(24)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    folder = tmp_path_factory.mktemp("site")
    build_site(ARTICLES, folder)
    return {page.url: page for page in read_site(folder)}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("urls")
    build_site(ARTICLES, folder)
    return (folder / "urls.txt").read_text().splitlines()


def text_of(page: Page) -> str:
    kind = page.headers["Content-Type"]
    return extract(page.body, kind, page.url, load_extractors(["trafilatura"])).text


def shingles(text: str) -> set[str]:
    return {text[n : n + 5] for n in range(len(text) - 4)}


def test_every_article_is_a_page_on_one_of_several_hosts(pages: dict[str, Page], urls: list[str]) -> None:
    for number, (title, text) in enumerate(ARTICLES.items()):
        (page,) = [page for page in pages.values() if re.search(rf"example/\d{{3}}-story-{number}$", page.url)]
        assert page.url in urls
        found = text_of(page)
        assert all(paragraph in found for paragraph in text.split("\n\n")), title
        assert "Privacy" not in found and "Most read" not in found
    assert len({urlsplit(url).hostname for url in pages}) >= 6


def test_copies_are_exact_and_edited_ones_near(pages: dict[str, Page]) -> None:
    copies = sorted(url for url in pages if "/copied/" in url)
    assert len(copies) == 8
    for url in copies:
        copied, near = text_of(pages[url]), text_of(pages[url.replace("/copied/", "/edited/")])
        original = next(text for title, text in ARTICLES.items() if url.endswith(title.lower().replace(" ", "-")))
        assert all(paragraph in copied for paragraph in original.split("\n\n"))
        a, b = shingles(copied), shingles(near)
        assert 0.8 <= len(a & b) / len(a | b) < 1


def test_an_edit_changes_words_and_keeps_the_layout() -> None:
    text = "\n\n".join(prose(n, 150) for n in range(2))
    words, changed = text.split(), edited(text).split()
    assert len(words) == len(changed) and 1 <= sum(a != b for a, b in zip(words, changed, strict=True)) <= 10
    assert edited(text).count("\n\n") == 1


def test_each_kind_of_trouble_is_there(pages: dict[str, Page], urls: list[str]) -> None:
    odd = {urlsplit(url).path: page for url, page in pages.items() if "corner.example" in url}
    german = text_of(odd["/archiv-bei-nacht"])
    assert len(german) > 600 and "Rechtschreibung" in german
    assert len(text_of(odd["/short-notice"])) < 512
    mojibake = text_of(odd["/careless-import"])
    assert "Ã©" in mojibake and "crème brûlée" in ftfy.fix_text(mojibake)
    assert "Déjà vu in the café." in text_of(odd["/old-charset"])
    assert odd["/hanging-server"].delay > 30 and 0.5 < odd["/slow-server"].delay < 2
    assert odd["/report.html"].headers["Content-Type"] == "application/pdf"
    assert odd["/old-address"].status == 301 and odd["/out-of-order"].status == 503
    assert "https://corner.example/no-such-page" in urls and "https://corner.example/no-such-page" not in pages


def test_the_list_has_urls_that_each_url_rule_drops_and_the_same_page_in_other_spellings(urls: list[str]) -> None:
    rules = UrlRules(BlacklistSettings())
    assert {"malformed", "scheme", "private_host", "domain", "extension"} <= {rules.reason(url) for url in urls}
    good = [canonical_url(url) for url in urls if rules.reason(url) is None]
    assert len(good) - len(set(good)) == 3


def test_other_articles_make_another_site_even_a_single_one(tmp_path: Path) -> None:
    build_site({"Only one": prose(7, 300)}, tmp_path)
    (page,) = [page for page in read_site(tmp_path) if "handbook.example" in page.url]
    assert prose(7, 300) in text_of(page)
    with pytest.raises(InputError, match="at least one article"):
        build_site({}, tmp_path)


def test_the_command_writes_the_same_bytes_every_time(command: Command, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert command("demo.build", "--output", tmp_path / name).returncode == 0
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) > 200
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_articles_are_shuffled_so_that_every_part_of_the_corpus_is_of_one_kind(urls: list[str], tmp_path: Path) -> None:
    numbers = [int(found[1]) for url in urls[:24] if (found := re.search(r"-story-(\d+)$", url))]
    assert sorted(numbers) == list(range(24)) and numbers != sorted(numbers)
    build_site(dict(reversed(ARTICLES.items())), tmp_path)
    assert (tmp_path / "urls.txt").read_text().splitlines() == urls, "not a matter of their order"
