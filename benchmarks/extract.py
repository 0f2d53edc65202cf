"""Extraction against gold texts: F1 of word 4-grams, and pages per CPU second, for each extractor.

The pages are those of the article-extraction-benchmark (github.com/scrapinghub/article-extraction-benchmark). The score
is that benchmark's: the 4-grams of words of each page, counted with repetitions, give its precision and recall; F1 is
computed from the means over pages. A page without a result has recall 0 and no precision.
"""

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
from benchmarks.inputs import Article, read_articles


class Score(NamedTuple):
    """Score of one page, each value between 0 and 1; None for a division by zero."""

    precision: float | None
    recall: float | None


def score(gold: str, answer: str) -> Score:
    """Precision and recall of the answer's 4-grams of words."""
    wanted, found = _ngrams(gold), _ngrams(answer)
    common = (wanted & found).total()
    return Score(common / found.total() if found else None, common / wanted.total() if wanted else None)


def _ngrams(text: str) -> Counter[tuple[str, ...]]:
    words = re.findall(r"\w+", text)
    return Counter(tuple(words[n : n + 4]) for n in range(max(1, len(words) - 3)) if words)


def overall(scores: Sequence[Score]) -> tuple[float, float, float]:
    """F1, precision and recall over pages."""
    precision = mean([page.precision for page in scores if page.precision is not None] or [0.0])
    recall = mean([page.recall for page in scores if page.recall is not None] or [0.0])
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0, precision, recall


def _f1(scores: Sequence[Score]) -> str:
    """`0.967 ± 0.005`: F1 and its standard error, by resampling pages."""
    rng = random.Random(1)
    error = stdev(overall(rng.choices(scores, k=len(scores)))[0] for _ in range(500))
    return f"{overall(scores)[0]:.3f} ± {error:.3f}"


def _reader(name: str) -> Callable[[str, str], str]:
    """The text that a peer finds in HTML and its URL; `tags stripped` is all text of the page."""
    if name == "tags stripped":
        from trafilatura import load_html

        parts = "//body//text()[not(parent::script or parent::style)]"
        return lambda html, url: " ".join(load_html(html).xpath(parts))
    if name.startswith("trafilatura"):
        from trafilatura.core import bare_extraction

        options = {"fast": name.endswith("fast"), "include_comments": False, "with_metadata": True}
        return lambda html, url: getattr(bare_extraction(html, url=url, **options), "text", "")
    import newspaper  # newspaper3k, or newspaper4k, which has the same module

    def read(html: str, url: str) -> str:
        page = newspaper.Article(url, fetch_images=False)
        page.download(input_html=html)
        page.parse()
        return str(page.text)

    return read


def peer(name: str, folder: Path) -> Timed:
    """Decode and extract all pages with a peer."""
    from corpus.extract.charset import decode

    read = _reader(name)
    return work(lambda article: read(decode(article.body, "text/html"), article.url), folder)


def ours(names: Sequence[str], folder: Path) -> Timed:
    """`scrape.extractors`."""
    from corpus.extract.extractors import extract, load_extractors

    extractors = load_extractors(names)
    return work(lambda article: extract(article.body, "text/html", article.url, extractors).text, folder)


def work(extract: Callable[[Article], str], folder: Path) -> Timed:
    """Extract all pages."""
    articles = read_articles(folder)
    warnings.simplefilter("ignore")  # newspaper's date parser warns about every unknown time zone

    def answer(article: Article) -> str:
        try:
            return extract(article)
        except Exception:  # newspaper3k fails on some pages: they have no result
            return ""

    answer(articles[0])  # lets the libraries load lazily imported parts
    return lambda: {"answers": [answer(article) for article in articles]}


def measure(arguments: Namespace) -> Iterator[Row]:
    """HTML extraction beside trafilatura and newspaper, against a gold standard."""
    folder = arguments.texts[0] if arguments.texts else Path("data/articles")
    articles = read_articles(folder)
    held_out = [article.held_out for article in articles]
    peers = ("trafilatura, fast", "trafilatura", packages_distributions()["newspaper"][0], "tags stripped")
    contenders = {name: partial(peer, name, folder) for name in peers}
    contenders |= {f"ours: {name}": partial(ours, [name], folder) for name in ("trafilatura", "resiliparse")}
    for row in compare("extractor", contenders, arguments.rounds, len(articles), "pages", clock="cpu"):
        scores = [score(article.gold, answer) for article, answer in zip(articles, row["answers"], strict=True)]
        _, precision, recall = overall(scores)
        yield {
            **{name: value for name, value in row.items() if name != "answers"},
            "F1": _f1(scores),
            "precision": precision,
            "recall": recall,
            "F1, held-out half": _f1([page for page, held in zip(scores, held_out, strict=True) if held]),
            "answered %": 100 * sum(bool(answer.strip()) for answer in row["answers"]) / len(articles),
        }
