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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from benchmarks.harness import Contender, Row, Timed, compare
from benchmarks.inputs import Article, read_articles
from common.settings import ScrapeSettings


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


# ------------------------------------------------------------------------------------------------ the contenders

Extractor = Callable[[Article], str]


def stripped() -> Extractor:
    """All text of the page."""
    from trafilatura import load_html

    from corpus.extract.charset import decode

    def read(article: Article) -> str:
        tree = load_html(decode(article.body, "text/html"))
        return " ".join(tree.xpath("//body//text()[not(parent::script or parent::style)]"))

    return read


def newspaper() -> Extractor:
    """newspaper3k, or newspaper4k, which has the same module."""
    from newspaper import Article as newspaper_article

    from corpus.extract.charset import decode

    def read(article: Article) -> str:
        page = newspaper_article(article.url, fetch_images=False)
        page.download(input_html=decode(article.body, "text/html"))
        page.parse()
        return str(page.text)

    return read


def trafilatura(fast: bool) -> Extractor:
    """trafilatura as it is."""
    from trafilatura.core import bare_extraction

    from corpus.extract.charset import decode

    def read(article: Article) -> str:
        html = decode(article.body, "text/html")
        found = bare_extraction(html, url=article.url, fast=fast, include_comments=False, with_metadata=True)
        return found.text if found is not None else ""

    return read


def ours(names: Sequence[str]) -> Extractor:
    """`scrape.extractors`."""
    from corpus.extract.extractors import extract, load_extractors

    extractors = load_extractors(names)
    return lambda article: extract(article.body, "text/html", article.url, extractors).text


def work(extractor: Callable[[], Extractor], folder: Path) -> Timed:
    """Extract all pages, and score them."""
    articles, extract = read_articles(folder), extractor()
    warnings.simplefilter("ignore")  # newspaper's date parser warns about every unknown time zone

    def answer(article: Article) -> str:
        try:
            return extract(article)
        except Exception:  # newspaper3k fails on some pages: they have no result
            return ""

    answer(articles[0])  # lets the libraries load lazily imported parts
    return lambda: {"answers": [answer(article) for article in articles]}


def measure(arguments: Namespace) -> Iterator[Row]:
    """The speed and the scores of each extractor."""
    folder = arguments.texts[0] if arguments.texts else Path("data/articles")
    articles = read_articles(folder)
    held_out = [article.held_out for article in articles]
    default = list(ScrapeSettings().extractors)
    extractors: Mapping[str, Callable[[], Extractor]] = {
        "trafilatura, fast": partial(trafilatura, fast=True),
        "trafilatura": partial(trafilatura, fast=False),
        packages_distributions()["newspaper"][0]: newspaper,
        "tags stripped": stripped,
        "ours: trafilatura": partial(ours, ["trafilatura"]),
        f"ours: {', '.join(default)}": partial(ours, default),
    }
    contenders = [
        Contender(name, work, (extractor, folder), bar=1.2 if name.startswith("ours") else None)
        for name, extractor in extractors.items()
    ]
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


# ------------------------------------------------------------------------------------------------ characters

# language -> Python's codecs and the labels that pages use
_CODECS = {
    "en": (("cp1252", "windows-1252"), ("utf-16-le", "utf-16le")),
    "fr": (("cp1252", "iso-8859-1"), ("iso8859_15", "iso-8859-15"), ("mac_roman", "macintosh")),
    "de": (("cp1252", "windows-1252"), ("utf-16-be", "utf-16be")),
    "cs": (("cp1250", "windows-1250"), ("iso8859_2", "iso-8859-2")),
    "pl": (("cp1250", "windows-1250"), ("iso8859_2", "iso-8859-2")),
    "ru": (("cp1251", "windows-1251"), ("koi8_r", "koi8-r"), ("iso8859_5", "iso-8859-5"), ("cp866", "ibm866")),
    "el": (("cp1253", "windows-1253"), ("iso8859_7", "iso-8859-7")),
    "tr": (("cp1254", "windows-1254"),),
    "ar": (("cp1256", "windows-1256"),),
    "fa": (("cp1256", "windows-1256"),),
    "ja": (("cp932", "shift_jis"), ("euc_jp", "euc-jp"), ("iso2022_jp", "iso-2022-jp")),
    "zh-CN": (("gbk", "gb2312"), ("gb18030", "gb18030")),
    "zh-TW": (("big5", "big5"),),
    "ko": (("cp949", "euc-kr"),),
}
_DECLARATION = re.compile(r"<\?xml[^>]*>|<meta[^>]*charset[^>]*>|\ufffd", re.IGNORECASE)
_TLDS = {"cs": "cz", "el": "gr", "ar": "ma", "fa": "ir", "ja": "jp", "ko": "kr"}


def _beyond_ascii(text: str) -> Counter[str]:
    return Counter(character for character in text if character > "\x9f" and character != "\ufffd")


def characters(arguments: Namespace) -> Iterator[Row]:
    """The share of non-ASCII characters that re-encoded pages lose, by where they declare their encoding.

    `--texts`: the folder of English articles, then one with a folder of HTML per language (de-DE, zh-TW, …).
    """
    from corpus.extract.charset import decode

    articles, *books = arguments.texts or [Path("data/articles")]
    for language, codecs in _CODECS.items():
        files = sorted(path for book in books for path in book.glob(f"{language}*/*.html"))
        url = f"http://one.{_TLDS.get(language, language[-2:].lower())}/"
        bodies = [(url, file.read_bytes()) for file in files]
        if language == "en":
            bodies = [(one.url, one.body) for one in read_articles(articles)]
        undeclared = [(url, _DECLARATION.sub("", body.decode("utf-8", "replace"))) for url, body in bodies]
        texts = [(url, text) for url, text in undeclared if _beyond_ascii(text)]
        most = 12 * (6 if language == "en" else 1)  # English pages have few of these characters
        texts = texts[:: max(1, len(texts) // most)][:most]
        for codec, label in codecs if texts else ():
            lost, total = Counter[str](), 0
            for url, text in texts:
                body = text.encode(codec, "xmlcharrefreplace")
                wanted = _beyond_ascii(body.decode(codec))
                meta = f'<!DOCTYPE html><head><meta charset="{label}">'.encode() if "utf-16" not in codec else b""
                for name, page, content_type in (
                    ("HTTP", body, f"text/html; charset={label}"),
                    ("<meta>", meta + body, "text/html"),
                    ("nothing", body, "text/html"),
                    ("wrong: utf-8", body, "text/html; charset=utf-8"),
                    ("wrong: iso-8859-1", body, "text/html; charset=iso-8859-1"),
                ):
                    lost[name] += (wanted - _beyond_ascii(decode(page, content_type, url))).total()
                for name in filter(find_spec, ("charset_normalizer", "chardet", "cchardet")):
                    found = import_module(name).detect(body)["encoding"]
                    lost[name] += (wanted - _beyond_ascii(body.decode(found or "utf-8", "replace"))).total()
                total += wanted.total()
            shares = {f"{name} %": 100 * count / max(total, 1) for name, count in lost.items()}
            yield {"language": language, "encoding": label, "characters": total, **shares}
