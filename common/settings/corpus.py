"""The configuration sections of the steps from text to tokens, and all that a corpus depends on."""

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from common.files import MAX_SHARDS
from common.settings.section import PositiveFloat, PositiveInt, Section, Share
from common.settings.sources import BlacklistSettings, FetchSettings, ScrapeSettings, SourceSettings


class FastTextModel(Section):
    """A fastText model by which `python -m corpus.clean` filters."""

    path: Path
    """A `.bin` or `.ftz` file."""
    label: str
    """Label of the documents to keep, without `__label__`."""
    least: Share = 0.5
    """Minimum probability of the label."""
    name: str = "fasttext"
    """Reason of dropped documents, and key of the probability under `meta` of kept ones."""


class CleanSettings(Section):
    """Text repair and document filters (`python -m corpus.clean`)."""

    language: str | list[str] = "en"
    """ISO 639-1 code of the language to keep, or a list (`[en, de]`). Empty (`""`): all."""
    fold_whitespace: bool = False
    """Fold spaces and blank lines, strip every line. Destroys indentation and tables for good."""
    min_characters: Annotated[int, Field(ge=0)] = 512
    """Minimum length of a document, in characters (OpenWebText's rule)."""
    javascript_characters: Annotated[int, Field(ge=0)] = 256
    """Documents with fewer characters that mention "javascript" are dropped as browser notices."""
    filters: list[str] = []
    """Further filters, in this order: gopher, gopher_repetition, c4, fineweb, pii, digits
    (docs/corpus.md).
    """
    fasttext: list[FastTextModel] = []
    """fastText models to filter by: a list of {path, label, least, name}."""

    @field_validator("language")
    @classmethod
    def _languages_are_known(cls, language: str | list[str]) -> str | list[str]:
        from pycld2 import DETECTED_LANGUAGES, LANGUAGES

        codes = {code for name, code in LANGUAGES if name in DETECTED_LANGUAGES and len(code) == 2}
        for code in [language] * bool(language) if isinstance(language, str) else language:
            if code not in codes - {"iw", "jw"} | {"he", "jv"}:  # newer codes of Hebrew and Javanese
                raise ValueError(f"{code!r} is not the code of a language that CLD2 knows; docs/corpus.md lists them")
        return language

    @property
    def languages(self) -> list[str]:
        """The codes of `language`; empty keeps every language."""
        return [self.language] * bool(self.language) if isinstance(self.language, str) else self.language


_RECALL = 0.9  # share of the pairs at the threshold that are found


def _recall(similarity: float, bands: int, rows: int) -> float:
    """The probability that two documents share a band (Mining of Massive Datasets, 3.4.2)."""
    return 1 - (1 - similarity**rows) ** bands


class DedupSettings(Section):
    """Exact and MinHash deduplication (`python -m corpus.dedup`)."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Minimum true Jaccard similarity of the shingle sets of two duplicates."""
    shingle_characters: Annotated[int, Field(gt=0, le=10)] = 5
    """Length of the character n-grams that are compared."""
    shingle_words: Annotated[int, Field(ge=0)] = 0
    """Compare n-grams of this many words instead, without punctuation; in scripts without spaces,
    such as Chinese, each character is a word. 0: character n-grams.
    """
    bands: PositiveInt = 20
    """LSH bands; 20 x 6 finds 92 % of the pairs at Jaccard 0.7 and 99.8 % at 0.8."""
    rows: PositiveInt = 6
    """MinHash values per band; bands x rows permutations are computed."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Seed of the permutations, below 2^32."""
    against: list[Path] = []
    """Earlier runs, or folders of `*.signatures`, whose documents win: a later document that is
    like one that they kept is dropped.
    """
    ranges: PositiveInt = 1
    """Parts of the hashes of every band, so that more jobs can share them. Results do not depend on
    it.
    """
    jobs: PositiveInt = 8
    """Maximum number of jobs that share the bands, and then the pairs to verify: one per 8 shards,
    those of `against` included, and at most (bands + 1) x ranges. Results do not depend on it.
    """
    memory_gb: PositiveFloat = 2.0
    """Memory limit per phase for data that grows with the corpus, in GB (see docs/dedup.md)."""

    def low_recall(self) -> str:
        """A warning if the bands find under 90 % of the pairs at the threshold, else ""."""
        recall = _recall(self.threshold, self.bands, self.rows)
        if recall >= _RECALL:
            return ""
        fitting = (rows for rows in range(self.rows, 0, -1) if self._bands(rows) * rows <= self.bands * self.rows)
        rows = next(fitting, 1)  # more rows propose fewer pairs that are no duplicates
        bands = self._bands(rows)
        return (
            f"dedup: {self.bands} bands of {self.rows} rows find {recall:.0%} of the pairs at Jaccard "
            f"{self.threshold:g}, the threshold; dedup.bands={bands} dedup.rows={rows} find "
            f"{_recall(self.threshold, bands, rows):.0%}"
        )

    def _bands(self, rows: int) -> int:
        """The number of bands of `rows` rows that find 90 % of the pairs at the threshold."""
        return math.ceil(math.log(1 - _RECALL) / math.log(1 - self.threshold**rows))

    @property
    def memory_bytes(self) -> int:
        """`memory_gb` in bytes."""
        return int(self.memory_gb * 1e9)


class RepeatsSettings(Section):
    """Removal of lines and paragraphs that repeat over the corpus (`python -m corpus.repeats`); off
    without units.
    """

    units: list[Literal["lines", "paragraphs"]] = []
    """What is compared: `lines`, `paragraphs` (lines without a blank one between them), or both."""
    min_bytes: PositiveInt = 50
    """Minimum UTF-8 length of a unit, in normalised form; a GPT-2 token has a byte or more."""
    max_count: PositiveInt = 1
    """Units that occur at most this often in the corpus are not cut."""
    keep_first: bool = True
    """Keep one copy of each unit, as C4 and Lee et al. (2022) do; false cuts all."""
    min_characters: Annotated[int, Field(ge=0)] = 200
    """Minimum length of a document after cuts, in characters; shorter ones are dropped."""
    memory_gb: PositiveFloat = 1.0
    """Memory limit of `sum`, in GB; with less it reads the units more often."""


class DecontaminateSettings(Section):
    """Removal of overlaps with evaluation sets (`python -m corpus.decontaminate`); off unless files
    are named.
    """

    files: list[str] = []
    """Evaluation sets: files or globs; JSON lines (every string in them), or one item per line."""
    min_words: PositiveInt = 8
    """Minimum n-gram length; shorter items are left out. 1.5 Chinese or 2.5 Thai characters count
    as a word.
    """
    max_words: PositiveInt = 13
    """Maximum n-gram length; a longer item is found by any of its n-grams of this length."""
    max_count: PositiveInt = 10
    """N-grams at least this frequent in the corpus are ordinary language and are not cut."""
    cut_characters: Annotated[int, Field(ge=0)] = 200
    """Characters cut on each side of a match, extended to the end of a sentence."""
    min_characters: Annotated[int, Field(ge=0)] = 200
    """Pieces of a document with this many characters or fewer are dropped."""
    max_pieces: PositiveInt = 10
    """Documents that fall into more pieces are dropped."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.min_words > self.max_words:
            raise ValueError(f"min_words {self.min_words} is greater than max_words {self.max_words}")
        return self


class TrainTokenizerSettings(Section):
    """Training of a vocabulary on the corpus (`python -m corpus.train_tokenizer`); off unless
    vocab_size is set.
    """

    vocab_size: Annotated[int, Field(ge=0)] = 0
    """Number of entries: 256 bytes, the merges, and <|endoftext|> last. 0: GPT-2's vocabulary."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the documents to train on, chosen by id; one core reads about 3 MB per second."""

    @field_validator("vocab_size")
    @classmethod
    def _bytes_fit(cls, size: int) -> int:
        if 0 < size < 257:
            raise ValueError("257 entries at least: the 256 bytes and end-of-text")
        return size


class TokenizeSettings(Section):
    """BPE encoding (`python -m corpus.tokenize`)."""

    min_tokens: Annotated[int, Field(ge=0)] = 128
    """Minimum number of tokens per document, without end-of-text; shorter documents are dropped."""
    append_eod: bool = True
    """Write <|endoftext|> after each document."""
    encoder_json: Path | None = None
    """Vocabulary instead of GPT-2's: an encoder.json (vocab.json) with vocab_bpe, or a
    tokenizer.json without it. Default if train_tokenizer is on: RUN/tokenizer/encoder.json.
    """
    vocab_bpe: Path | None = None
    """Merges of encoder_json (merges.txt). With train_tokenizer: RUN/tokenizer/vocab.bpe."""


class CorpusSettings(Section):
    """The settings of a run's corpus. A new step with settings gets a section here."""

    run: Path
    """Folder of all results of the run."""
    urls: list[str] = []
    """URL lists: files, folders or globs."""
    sources: list[SourceSettings] = []
    """Existing text, in addition to URLs or instead of them: a list of {path, glob, anonymous,
    keep, format, encoding, text_key, skip_keys, name}.
    """
    base: list[Path] = []
    """Finished runs that this one extends, one folder or all, the oldest first: URLs and files of
    `sources` that they have read are left out, and models also train on their datasets
    (docs/corpus.md).
    """
    site: Path | None = None
    """Folder of a recorded site (workflow.demo.serve) to fetch URLs from. Left out: the web."""
    shards: Annotated[int, Field(gt=0, le=MAX_SHARDS)] = 1
    """Number of shards, at most 100,000; it fixes the order of documents and nothing else."""
    max_bad_share: Share = 0.001
    """Maximum share of unreadable lines in an input, and of text files in `sources`; a step with
    more fails.
    """
    blacklist: BlacklistSettings = BlacklistSettings()
    """URL rules."""
    scrape: ScrapeSettings = ScrapeSettings()
    """Fetching and extraction."""
    fetch: FetchSettings = FetchSettings()
    """Fetching of sources that are URLs."""
    clean: CleanSettings = CleanSettings()
    """Text repair and filters."""
    dedup: DedupSettings = Field(default=DedupSettings(), validate_default=True)
    """Deduplication."""
    repeats: RepeatsSettings = RepeatsSettings()
    """Removal of repeated lines and paragraphs."""
    decontaminate: DecontaminateSettings = DecontaminateSettings()
    """Removal of overlaps with evaluation sets."""
    train_tokenizer: TrainTokenizerSettings = TrainTokenizerSettings()
    """Training of a vocabulary on the corpus."""
    tokenize: TokenizeSettings = Field(default=TokenizeSettings(), validate_default=True)
    """BPE encoding."""

    @property
    def remote_sources(self) -> list[SourceSettings]:
        """The sources that are URLs."""
        return [source for source in self.sources if source.is_remote]

    @property
    def fetch_folder(self) -> Path:
        """Where their files and listings lie."""
        return self.run / "fetch"

    @property
    def local_sources(self) -> list[SourceSettings]:
        """All sources, as files here."""
        return [source.fetched(self.fetch_folder) if source.is_remote else source for source in self.sources]

    @property
    def has_pages(self) -> bool:
        """Whether a source may be WARC files, so that keys of `scrape` apply to `ingest`."""
        return any(source.has_pages for source in self.sources)

    @field_validator("base", mode="before", json_schema_input_type=Path | list[Path])
    @classmethod
    def _one_base(cls, base: object) -> object:
        return [base] if isinstance(base, str | Path) else base

    @field_validator("dedup")
    @classmethod
    def _earlier_documents_win(cls, dedup: DedupSettings, info: ValidationInfo) -> DedupSettings:
        """Put the runs of `base` before those of `against`."""
        return dedup.model_copy(update={"against": list(dict.fromkeys([*info.data.get("base", []), *dedup.against]))})

    @field_validator("tokenize")
    @classmethod
    def _trained_vocabulary(cls, tokenize: TokenizeSettings, info: ValidationInfo) -> TokenizeSettings:
        """Default to the files that train_tokenizer writes, if it is on."""
        trained, run = info.data.get("train_tokenizer"), info.data.get("run")
        if run is None or trained is None or not trained.vocab_size:
            return tokenize
        files = {"encoder_json": run / "tokenizer/encoder.json", "vocab_bpe": run / "tokenizer/vocab.bpe"}
        for key, path in files.items():
            if getattr(tokenize, key) not in (None, path):
                raise ValueError(f"{key} and train_tokenizer.vocab_size name two vocabularies; give one of them")
        return tokenize.model_copy(update=files)
