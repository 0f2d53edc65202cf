"""Inputs of the corpus benchmarks: URLs, texts, documents, and recorded pages; the same in every run."""

import gzip
import hashlib
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from common.errors import InputError
from common.files import Document, document_writer, read_json, short_hash

_WORDS = (
    "the of and to in for on with as by at from how why what new world first last day year city state war people life "
    "home water school music study report house power market health science climate police court game team season"
).split()
_TLDS = "com com com org net co.uk de fr ca com.au io edu ru info".split()
_ENDINGS = (*[""] * 12, "/", "/", "/", "/", ".html", ".html", ".htm", ".php", ".aspx", ".jpg", ".gif", ".png", ".pdf")
_QUERIES = (
    *[""] * 30,
    *("?id={}", "?p={}", "?page={}&ref=home", "?utm_source=feed&utm_medium=rss&id={}", "?q=%C3%A9t%C3%A9+{}"),
)
_FOREIGN = ("de", "es", "fr", "it", "nl", "pl", "pt", "ru", "sv", "tr")
_SHARES = (0.01, 0.03, 0.05, 0.06, 0.07, 0.08, 0.09)  # of words that a copy replaces
_ARTICLES = "https://github.com/scrapinghub/article-extraction-benchmark"


def make_urls(count: int) -> Iterator[str]:
    """Realistic URLs: half on a few hundred busy hosts, half over a long tail of hosts."""
    chance = random.Random(1)
    text = (Path(__file__).parent / "hosts.txt").read_text(encoding="utf-8")
    busy = [host for line in text.splitlines() if not line.startswith("#") for host in line.split()]
    weights = list(accumulate(1 / rank for rank in range(1, len(busy) + 1)))  # Zipf: the second host has half the URLs
    earlier: list[str] = []
    for _ in range(count):
        number = chance.randrange(1_000_000)
        if earlier and number % 20 == 0:  # a duplicate of an earlier link
            yield chance.choice(earlier)
            continue
        if number % 2:
            (host,) = chance.choices(busy, cum_weights=weights)
        else:
            rare = int(250_000 * chance.random() ** 5)  # at a million URLs, one in eight has a new host
            name = f"{_WORDS[rare % 43]}{_WORDS[rare % 41]}{rare}"
            host = f"{('www.', 'www.', 'blog.', '')[rare % 4]}{name}.{_TLDS[rare % len(_TLDS)]}"
        slug = "-".join(chance.choices(_WORDS, k=chance.randrange(2, 9)))
        day = f"/{2005 + number % 15}/{1 + number % 12:02d}" if number % 3 else f"/{chance.choice(_WORDS)}"
        url = f"http{'s' * (number % 3 == 0)}://{host}{day}/{slug}{chance.choice(_ENDINGS)}"
        url += chance.choice(_QUERIES).format(number) + ("#comments" if number % 50 == 0 else "")
        if len(earlier) < 10_000:
            earlier.append(url)
        else:
            earlier[number % 10_000] = url
        yield url


def read_texts(folder: Path) -> Iterator[str]:
    """The texts of all files below a folder, in an order that mixes languages. Raises InputError if there are none."""
    import trafilatura

    files = [path for path in folder.rglob("*") if re.search(r"\.(html|txt)(\.gz)?$", path.name) and path.is_file()]
    if not files:
        raise InputError(f"{folder}: no file that ends in .html, .txt, .html.gz or .txt.gz")
    for path in sorted(files, key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest()):
        body = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = trafilatura.extract(body, fast=True) if ".html" in path.suffixes else body.decode("utf-8", "replace")
        if text:
            yield text


def packaged_texts() -> Iterator[str]:
    """An endless mix of English that every Python carries, and frequent words of other languages, not in sentences."""
    from pydoc_data.topics import topics

    import newspaper

    chance = random.Random(1)
    lists = Path(newspaper.__file__).parent / "resources" / "text"
    words = {}
    for code in _FOREIGN:
        lines = (lists / f"stopwords-{code}.txt").read_text(encoding="utf-8").splitlines()
        words[code] = " ".join(line for line in lines if not line.startswith("#")).split()  # one begins with a licence
    while True:
        for text in topics.values():
            yield text
            if chance.random() < 0.2:
                yield " ".join(chance.choices(words[chance.choice(_FOREIGN)], k=2000))


def cut(texts: Iterator[str], count: int) -> list[Document]:
    """Up to `count` documents cut from the texts, log-uniform from 500 to 16,000 characters."""
    chance, found = random.Random(1), list[Document]()
    for text in texts:
        start = 0
        while start + 500 < len(text) and len(found) < count:
            size = int(10 ** chance.uniform(2.7, 4.2))
            found.append({"id": short_hash(f"{len(found)}"), "text": text[start : start + size]})
            start += size
        if len(found) == count:
            break
    return found


def with_copies(count: int) -> tuple[list[Document], list[tuple[int, int]]]:
    """Documents of 3,000 characters made of real sentences, one in five a copy of another with some words replaced.

    Also the pairs (original, copy).
    """
    from pydoc_data.topics import topics

    chance = random.Random(1)
    parts = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", " ".join(topics.values())))
    pool = [sentence for sentence in parts if len(sentence) > 20]
    words = " ".join(pool).split()
    documents: list[Document] = []
    planted = []
    for number in range(count):
        if number % 5 == 4:
            original = chance.randrange(number)
            share = chance.choice(_SHARES)
            old = documents[original]["text"].split(" ")
            text = " ".join(chance.choice(words) if chance.random() < share else word for word in old)
            planted.append((original, number))
        else:
            text = ""
            while len(text) < 3000:
                text += chance.choice(pool) + " "
        documents.append({"id": f"{number:016x}", "text": text})
    return documents, planted


def write_documents(path: Path, documents: Iterable[Document]) -> Path:
    """Write a shard, and return its path."""
    with document_writer(path) as write:
        for document in documents:
            write(document)
    return path


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
    """The pages of the article-extraction-benchmark, sorted by key. Raises InputError for another kind of folder."""
    truth = folder / "ground-truth.json"
    if not truth.is_file():
        raise InputError(f"{truth}: no such file; clone {_ARTICLES} and name its folder with --texts")
    bodies = {key: gzip.decompress((folder / "html" / f"{key}.html.gz").read_bytes()) for key in read_json(truth)}
    return [Article(key, one["url"], bodies[key], one["articleBody"]) for key, one in sorted(read_json(truth).items())]
