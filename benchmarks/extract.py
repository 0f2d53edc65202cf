"""Extraction against gold texts: F1 of word 4-grams, and pages per CPU second, for each extractor.

The pages are those of the article-extraction-benchmark
(github.com/scrapinghub/article-extraction-benchmark). The score is that benchmark's: the 4-grams of
words of each page, counted with repetitions, give its precision and recall; F1 is computed from the
means over pages. A page without a result has recall 0 and no precision.
"""

import gzip
import hashlib
import random
import re
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from benchmarks.harness import Row, Timed, compare
from common.errors import InputError
from common.files import read_json


class Article(NamedTuple):
    """A recorded page and the text that an extractor should find in it."""

    url: str
    body: bytes
    gold: str
    held_out: bool
    """Whether the page is in the held-out half; rules are tuned on the other half."""


def read_articles(folder: Path) -> list[Article]:
    """The pages of the article-extraction-benchmark. Raises InputError for another folder."""
    truth = folder / "ground-truth.json"
    if not truth.is_file():
        where = "https://github.com/scrapinghub/article-extraction-benchmark"
        raise InputError(f"{truth}: no such file; clone {where} and name its folder with --texts")
    articles = []
    for key, page in sorted(read_json(truth).items()):
        held_out = hashlib.sha256(key.encode()).digest()[0] % 2 == 1
        body = gzip.decompress((folder / "html" / f"{key}.html.gz").read_bytes())
        articles.append(Article(page["url"], body, page["articleBody"], held_out))
    return articles


Score = tuple[float | None, float | None]
"""Precision and recall of a page; None for a division by zero."""


def score(gold: str, answer: str) -> Score:
    """Precision and recall of the answer's 4-grams of words."""
    wanted, given = (Counter(phrases(re.findall(r"\w+", text))) for text in (gold, answer))
    common = (wanted & given).total()
    return common / given.total() if given else None, common / wanted.total() if wanted else None


def phrases(words: list[str]) -> Iterator[tuple[str, ...]]:
    """The runs of four words; all words if there are fewer."""
    return (tuple(words[n : n + 4]) for n in range(max(1, len(words) - 3)) if words)


def overall(scores: Sequence[Score]) -> tuple[float, float, float]:
    """F1, precision and recall over pages."""
    precision, recall = (mean([one for one in ones if one is not None] or [0.0]) for ones in zip(*scores, strict=True))
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0, precision, recall


def _f1(scores: Sequence[Score]) -> str:
    """`0.967 ± 0.005`: F1 and its standard error, by resampling pages."""
    rng = random.Random(1)
    error = stdev(overall(rng.choices(scores, k=len(scores)))[0] for _ in range(500))
    return f"{overall(scores)[0]:.3f} ± {error:.3f}"


def reader(name: str) -> Callable[[Article], str]:
    """The text that an extractor finds in a page, empty if it fails; peers get the page decoded."""
    from corpus.extract.charset import decode
    from corpus.extract.extractors import extract, load_extractors

    warnings.simplefilter("ignore")  # newspaper's date parser warns about every unknown time zone
    if name.startswith("ours: "):
        extractors = load_extractors([name.removeprefix("ours: ")])
        return lambda page: extract(page.body, "text/html", page.url, extractors).text
    if name.startswith("trafilatura"):
        from trafilatura.core import bare_extraction

        options = {"fast": name.endswith("fast"), "include_comments": False, "with_metadata": True}
        return lambda page: getattr(
            bare_extraction(decode(page.body, "text/html"), url=page.url, **options), "text", ""
        )
    import newspaper  # newspaper3k, or newspaper4k, which has the same module

    def read(page: Article) -> str:
        article = newspaper.Article(page.url, fetch_images=False)
        try:
            article.download(input_html=decode(page.body, "text/html"))
            article.parse()
        except Exception:  # newspaper3k fails on some pages
            return ""
        return str(article.text)

    return read


def extracting(name: str, folder: Path) -> Timed:
    """Extract all pages."""
    answer, articles = reader(name), read_articles(folder)
    answer(articles[0])  # lets the libraries load lazily imported parts
    return lambda: {"answers": [answer(article) for article in articles]}


def measure(arguments: Namespace) -> Iterator[Row]:
    """HTML extraction against trafilatura and newspaper, scored by gold texts."""
    folder = arguments.texts[0] if arguments.texts else Path("data/articles")
    articles = read_articles(folder)
    peers = ("trafilatura, fast", "trafilatura", packages_distributions()["newspaper"][0])
    names = (*peers, "ours: trafilatura", "ours: resiliparse")
    contenders = {name: partial(extracting, name, folder) for name in names}
    for row in compare("extractor", contenders, arguments.rounds, len(articles), "pages", clock="cpu"):
        scores = [score(article.gold, answer) for article, answer in zip(articles, row["answers"], strict=True)]
        _, precision, recall = overall(scores)
        yield {
            **{name: value for name, value in row.items() if name != "answers"},
            "F1": _f1(scores),
            "precision": precision,
            "recall": recall,
            "F1, held-out half": _f1(
                [page for page, article in zip(scores, articles, strict=True) if article.held_out]
            ),
        }
