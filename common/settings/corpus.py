"""The sections of the corpus steps."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from common.settings.robot import TOKEN, product_token
from common.settings.section import PositiveFloat, PositiveInt, Section, Share


class BlacklistSettings(Section):
    """URL rules (`python -m corpus.blacklist`)."""

    min_length: PositiveInt = 9
    """Shortest URL kept, in characters; the published recipe drops lengths up to 8."""
    allow_private_hosts: bool = False
    """Keep URLs of loopback, private and link-local addresses, *.local and *.internal."""
    extra_domains: list[str] = []
    """Hosts with everything below them (`blog.example.com`) or names of registered domains (`example`) to drop besides
    the built-in list."""
    domain_lists: list[Path] = []
    """Files with more of these, one per line, plain or compressed; also hosts files and Adblock's lists of domains.
    docs/corpus.md has the syntax; entries that can never match a host are counted and reported."""
    extra_suffixes: list[str] = []
    """Ends of host names to drop, public suffixes too: `gov.au` stands for itself and everything below it."""
    extra_patterns: list[str] = []
    """Regular expressions (Python's) that drop the URLs they are found in; `(?i)` ignores case."""
    extra_extensions: list[Annotated[str, Field(pattern=r"^\.[^./]+$")]] = []
    """Path endings to drop besides the built-in list, with their dot."""
    min_score: int = 3
    """Pushshift dumps: submissions with a lower score are skipped (OpenWebText's rule)."""
    over_18: bool = False
    """Pushshift dumps: take submissions marked over_18."""
    self_posts: bool = False
    """Pushshift dumps: take submissions that link to themselves (is_self)."""

    @field_validator("extra_patterns")
    @classmethod
    def _patterns_compile(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns


class ScrapeSettings(Section):
    """Fetching and extraction (`python -m corpus.scrape`)."""

    user_agent: str = "urls-to-gpt2/0.1"
    """Sent as User-Agent, followed by the contact in brackets."""
    robot_name: Annotated[str, Field(pattern=rf"^({TOKEN})?$")] = ""
    """Name by which robots.txt addresses this robot; empty: the product that user_agent names, which is `MyBot` in both
    `MyBot/1.0` and `Mozilla/5.0 (compatible; MyBot/1.0; +https://…)`."""
    contact: str = ""
    """Mail address or page for site owners; scraping a public host without one is refused."""
    resolve: dict[str, str] = {}
    """`host: ip:port`, `"*": ip:port` for every host: connect there with plain HTTP instead of asking DNS; private
    addresses are allowed for these hosts only. For tests, mirrors and the demo."""
    concurrency: PositiveInt = 256
    """Requests under way at once, over all hosts."""
    host_delay: Annotated[float, Field(ge=0)] = 1.0
    """Seconds between two requests to one host; a Crawl-delay in robots.txt that is longer wins."""
    obey_robots: bool = True
    """Fetch and obey robots.txt."""
    connect_timeout: PositiveFloat = 10.0
    """Seconds to connect."""
    read_timeout: PositiveFloat = 15.0
    """Seconds of silence from a server."""
    page_timeout: PositiveFloat = 60.0
    """Seconds for one attempt at a page, first byte to last."""
    max_bytes: PositiveInt = 10 * 1024 * 1024
    """Cap on a decoded body, in bytes; larger pages are dropped."""
    max_redirects: Annotated[int, Field(ge=0)] = 5
    """Redirects followed; every hop passes the URL rules again."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Further attempts after 429, 5xx and connection errors."""
    retry_delay: PositiveFloat = 1.0
    """Seconds before the first retry; doubles each time; Retry-After is honoured when longer."""
    host_failures: PositiveInt = 10
    """Pages of one host in a row that fail by its fault (no connection, no answer, 429, 5xx) before the rest of its
    URLs are given up."""
    extractors: Annotated[list[Literal["trafilatura", "newspaper3k"]], Field(min_length=1)] = [
        "trafilatura",
        "newspaper3k",
    ]
    """HTML extractors in order; the next one is asked when an answer holds too little of the page, and the longest
    answer wins. `[newspaper3k]` alone is OpenWebText's recipe."""
    extract_timeout: PositiveFloat = 10.0
    """Seconds one page may take to extract before its worker is killed."""
    extract_memory_mb: Annotated[int, Field(ge=100)] = 1000
    """Memory one page may take to extract, in MiB, beside the libraries' 100; a page that takes more is dropped. The
    largest of 181 real pages, of 1.5 MB, takes 41."""
    archive: bool = False
    """Keep the raw responses as WARC files beside the pages."""

    @property
    def robot_token(self) -> str:
        """The name by which robots.txt addresses us; empty only where it is not obeyed."""
        return self.robot_name or product_token(self.user_agent) or ""

    @model_validator(mode="after")
    def _robot_is_named(self) -> Self:
        name = self.robot_name
        if self.obey_robots and not self.robot_token:
            raise ValueError(f"user_agent {self.user_agent!r} names no robot: use `MyBot/1.0`, or set robot_name")
        if name.lower() not in self.user_agent.lower():  # RFC 9309: site owners find it in their logs
            raise ValueError(f"robot_name {name!r} must be a part of user_agent {self.user_agent!r}")
        return self


class SourceSettings(Section):
    """Existing text (`python -m corpus.ingest`)."""

    path: str
    """File, folder or glob."""
    format: Literal["jsonl", "text", "wikiextractor"] | None = None
    """Leave out to go by the files' names: *.txt, wiki_00, JSON lines all others."""
    text_key: str = "text"
    """Key of JSON objects that holds the text."""


class GopherSettings(Section):
    """Gopher's quality rules (Rae et al. 2021, table A1), made for English."""

    enabled: bool = False
    """Drop the documents that break one of them."""
    min_words: Annotated[int, Field(ge=0)] = 50
    """Fewest words, white space between them."""
    max_words: PositiveInt = 100_000
    """Most words."""
    min_word_length: Annotated[float, Field(ge=0)] = 3
    """Shortest mean word, in characters."""
    max_word_length: PositiveFloat = 10
    """Longest mean word, in characters."""
    max_symbols: Share = 0.1
    """Most # a word, and most ellipses (... or …) a word."""
    max_bullets: Share = 0.9
    """Largest share of lines that begin with a bullet."""
    max_ellipses: Share = 0.3
    """Largest share of lines that end with an ellipsis."""
    min_alphabetic: Share = 0.8
    """Smallest share of words with a letter in them."""
    min_stop_words: Annotated[int, Field(ge=0, le=8)] = 2
    """How many of `the be to of and that have with` a text must have."""


class CleanSettings(Section):
    """Text repair and document filters (`python -m corpus.clean`)."""

    language: Annotated[str, Field(pattern="^([a-z]{2})?$")] = "en"
    """ISO 639-1 code that documents must have (CLD2 and langdetect); empty (`""`) keeps every language."""
    min_characters: Annotated[int, Field(ge=0)] = 512
    """Shorter documents are dropped (OpenWebText's rule)."""
    javascript_characters: Annotated[int, Field(ge=0)] = 256
    """Documents shorter than this that mention "javascript" are browser notices and are dropped."""
    gopher: GopherSettings = GopherSettings()
    """Quality rules."""


class DedupSettings(Section):
    """Exact and MinHash deduplication (`python -m corpus.dedup`)."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    """True Jaccard similarity of shingle sets from which two documents count as duplicates."""
    shingle_characters: Annotated[int, Field(gt=0, le=10)] = 5
    """Length of the character n-grams compared."""
    shingle_words: Annotated[int, Field(ge=0)] = 0
    """Compare n-grams of this many words instead; 0: of characters."""
    bands: PositiveInt = 20
    """LSH bands; 20 x 6 finds 0.92 of the pairs at Jaccard 0.7 and 0.998 at 0.8."""
    rows: PositiveInt = 6
    """MinHash values in a band; bands x rows permutations are computed."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Seed of the permutations, below 2^32."""
    jobs: PositiveInt = 8
    """Slurm jobs that share the bands, and then the pairs to verify: at most bands + 1. No result depends on it."""
    memory_gb: PositiveFloat = 2.0
    """Memory a phase may fill with what grows with the corpus, in GB; docs/dedup.md has the cost of a document."""

    @property
    def memory_bytes(self) -> int:
        """`memory_gb` in bytes."""
        return int(self.memory_gb * 1e9)


class DecontaminateSettings(Section):
    """Overlap with evaluation sets (`python -m corpus.decontaminate`); off unless files are named."""

    files: list[str] = []
    """Evaluation sets: files or globs, plain or compressed; JSON lines (every string in them), or an item a line."""
    min_words: PositiveInt = 8
    """Shortest n-gram: items with fewer words (1.5 Chinese characters, 2.5 in Thai or kana, are one) are left out."""
    max_words: PositiveInt = 13
    """Longest n-gram: items with more words are looked for by all of theirs of this length."""
    max_count: PositiveInt = 10
    """N-grams that occur so often in the corpus are ordinary language and stay."""
    cut_characters: Annotated[int, Field(ge=0)] = 200
    """Characters cut on each side of a match, and on to the end of a sentence."""
    min_characters: Annotated[int, Field(ge=0)] = 200
    """Pieces of a document must be longer to be kept."""
    max_pieces: PositiveInt = 10
    """Documents in more pieces are dropped."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.min_words > self.max_words:
            raise ValueError(f"min_words {self.min_words} is more than max_words {self.max_words}")
        return self


class TrainTokenizerSettings(Section):
    """A vocabulary of the corpus' own (`python -m corpus.train_tokenizer`); off unless it has a size."""

    vocab_size: Annotated[int, Field(ge=0)] = 0
    """Entries: 256 bytes, merges, and <|endoftext|> as the last one. 0: GPT-2's published vocabulary."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the documents to train on, chosen by their hashed ids; a core reads some three megabytes a second."""

    @field_validator("vocab_size")
    @classmethod
    def _bytes_fit(cls, size: int) -> int:
        if 0 < size < 257:
            raise ValueError("257 entries at least: the 256 bytes and end-of-text")
        return size


class TokenizeSettings(Section):
    """BPE encoding (`python -m corpus.tokenize`)."""

    min_tokens: Annotated[int, Field(ge=0)] = 128
    """Documents with fewer tokens (end-of-text not counted) are dropped."""
    append_eod: bool = True
    """Write <|endoftext|> after each document."""
    encoder_json: Path | None = None
    """Vocabulary file instead of the packaged GPT-2 one; needs vocab_bpe too. RUN/tokenizer/encoder.json where
    train_tokenizer makes it."""
    vocab_bpe: Path | None = None
    """Merges file instead of the packaged GPT-2 one; needs encoder_json too. RUN/tokenizer/vocab.bpe likewise."""
