"""Extraction against gold texts: F1 of word 4-grams, and pages per second on one core, for each extractor.

The pages are those of the article-extraction-benchmark (github.com/scrapinghub/article-extraction-benchmark): its
`html/*.html.gz` and `ground-truth.json`. The score is that benchmark's: the 4-grams of words of each page, counted with
repetitions, give its precision and recall; F1 is computed from the means over pages. A page without a result has recall
0 and no precision.
"""

import argparse
import gzip
import hashlib
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from benchmarks.machine import table
from common.cli import input_path
from common.errors import InputError
from common.files import read_json
from common.settings import ScrapeSettings

ARTICLES = Path("data/articles")
_SOURCE = "https://github.com/scrapinghub/article-extraction-benchmark"
_NGRAM = 4
_RESAMPLES = 500
_ROUNDS = 3  # the fastest one counts, so that other load does not matter
_WORD = re.compile(r"\w+")


class Score(NamedTuple):
    """Score of one page, each value between 0 and 1; None for a division by zero."""

    precision: float | None
    recall: float | None


@dataclass(frozen=True)
class Article:
    """A recorded page and the text that an extractor should find in it."""

    key: str
    url: str
    body: bytes
    gold: str

    @property
    def held_out(self) -> bool:
        """Whether the page is in the held-out half, by its hash; rules are tuned on the other half."""
        return hashlib.sha256(self.key.encode()).digest()[0] % 2 == 1


def read_articles(folder: Path) -> list[Article]:
    """The pages of a benchmark folder, sorted by key. Raises InputError for another kind of folder."""
    truth = folder / "ground-truth.json"
    if not truth.is_file():
        raise InputError(f"{truth}: no such file; clone {_SOURCE} and name its folder with --articles")
    return [
        Article(
            key, entry["url"], gzip.decompress((folder / "html" / f"{key}.html.gz").read_bytes()), entry["articleBody"]
        )
        for key, entry in sorted(read_json(truth).items())
    ]


def score(gold: str, answer: str) -> Score:
    """Precision and recall of the answer's 4-grams of words."""
    wanted, found = _ngrams(gold), _ngrams(answer)
    common = (wanted & found).total()
    return Score(
        common / found.total() if found else None,
        common / wanted.total() if wanted else None,
    )


def _ngrams(text: str) -> Counter[tuple[str, ...]]:
    words = _WORD.findall(text)
    return Counter(tuple(words[n : n + _NGRAM]) for n in range(max(1, len(words) - _NGRAM + 1)) if words)


def overall(scores: Sequence[Score]) -> tuple[float, float, float]:
    """F1, precision and recall over pages."""
    precision = mean([page.precision for page in scores if page.precision is not None] or [0.0])
    recall = mean([page.recall for page in scores if page.recall is not None] or [0.0])
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0, precision, recall


def standard_error(scores: Sequence[Score]) -> float:
    """Standard error of F1, by resampling pages."""
    rng = random.Random(1)
    return stdev(overall(rng.choices(scores, k=len(scores)))[0] for _ in range(_RESAMPLES))


# ------------------------------------------------------------------------------------------------ the contenders

Contender = Callable[[Article], str]


def contenders() -> Mapping[str, Contender]:
    """Extractors by the name of their row."""
    from newspaper import Article as newspaper_article
    from trafilatura import load_html
    from trafilatura.core import bare_extraction

    from corpus.extract.charset import decode
    from corpus.extract.extractors import extract, load_extractors

    def listed(*names: str) -> Contender:
        extractors = load_extractors(names)

        return lambda article: extract(article.body, "text/html", article.url, extractors).text

    def newspaper(article: Article) -> str:
        page = newspaper_article(article.url, fetch_images=False)
        page.download(input_html=decode(article.body, "text/html"))
        page.parse()
        return str(page.text)

    def trafilatura(article: Article, fast: bool) -> str:
        html = decode(article.body, "text/html")
        found = bare_extraction(html, url=article.url, fast=fast, include_comments=False, with_metadata=True)
        return found.text if found is not None else ""

    def stripped(article: Article) -> str:
        tree = load_html(decode(article.body, "text/html"))
        return " ".join(tree.xpath("//body//text()[not(parent::script or parent::style)]"))

    default: list[str] = list(ScrapeSettings().extractors)
    return {
        "tags stripped": stripped,
        packages_distributions()["newspaper"][0]: newspaper,  # or newspaper4k, which has the same module
        "trafilatura": partial(trafilatura, fast=False),
        "trafilatura, fast": partial(trafilatura, fast=True),
        "ours: trafilatura": listed("trafilatura"),
        f"ours: {', '.join(default)}": listed(*default),
    }


# ------------------------------------------------------------------------------------------------ the command


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--articles", type=input_path, default=ARTICLES, metavar="DIR", help=f"folder of the pages (default {ARTICLES})"
    )


def measure(arguments: argparse.Namespace) -> str:
    """The scores and the speed of each extractor."""
    articles = read_articles(arguments.articles)
    compared = contenders()
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    answers: dict[str, list[str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newspaper's date parser warns about every unknown time zone
        for contender in compared.values():
            _answer(contender, articles[0])  # lets the libraries load lazily imported parts
        for _ in range(_ROUNDS):
            for name, contender in compared.items():
                start = time.process_time()
                answers[name] = [_answer(contender, article) for article in articles]
                seconds[name].append(time.process_time() - start)
    return table([_row(name, articles, answers[name], min(seconds[name])) for name in compared])


def _answer(contender: Contender, article: Article) -> str:
    try:
        return contender(article)
    except Exception:  # newspaper3k fails on some pages: they have no result
        return ""


def _row(name: str, articles: Sequence[Article], answers: Sequence[str], seconds: float) -> dict[str, str]:
    scores = [score(article.gold, answer) for article, answer in zip(articles, answers, strict=True)]
    held_out = [page for article, page in zip(articles, scores, strict=True) if article.held_out]
    f1, precision, recall = overall(scores)
    return {
        "extractor": name,
        "F1": f"{f1:.3f} ± {standard_error(scores):.3f}",
        "precision": f"{precision:.3f}",
        "recall": f"{recall:.3f}",
        "F1, held-out half": f"{overall(held_out)[0]:.3f} ± {standard_error(held_out):.3f}",
        "pages/s/core": f"{len(articles) / seconds:.1f}",
        "answered": f"{sum(bool(answer.strip()) for answer in answers) / len(answers):.1%}",
    }
