"""The configuration as typed models: every key, its meaning, unit and default. `common.config` reads them from YAML."""

import difflib
import re
from collections.abc import Iterable
from glob import glob
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Share = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, every field carries its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


# ------------------------------------------------------------------------------------------------ corpus


class BlacklistSettings(Section):
    """URL rules (`python -m corpus.blacklist`)."""

    min_length: PositiveInt = 9
    """Shortest URL kept, in characters; the published recipe drops lengths up to 8."""
    allow_private_hosts: bool = False
    """Keep URLs of loopback, private and link-local addresses, *.local and *.internal."""
    extra_domains: list[str] = []
    """Registered domains (`example.com`) or names (`example`) to drop besides the built-in list."""
    domain_lists: list[Path] = []
    """Files with more of these, one a line, plain or compressed; what follows a `#` is a comment."""
    extra_suffixes: list[str] = []
    """Ends of host names to drop: `blogs.example.com` stands for itself and everything below it."""
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
    archive: bool = False
    """Keep the raw responses as WARC files beside the pages."""


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
    """ISO 639-1 code that documents must have (CLD2 and langdetect); empty keeps every language."""
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
    seed: Annotated[int, Field(ge=0)] = 1
    """Seed of the permutations."""
    jobs: PositiveInt = 8
    """Slurm jobs over which the bands are spread, and then the pairs to verify."""
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
    """Shortest n-gram: items with fewer words are not looked for."""
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


class TokenizeSettings(Section):
    """BPE encoding (`python -m corpus.tokenize`)."""

    min_tokens: Annotated[int, Field(ge=0)] = 128
    """Documents with fewer tokens (end-of-text not counted) are dropped."""
    append_eod: bool = True
    """Write <|endoftext|> after each document."""
    encoder_json: Path | None = None
    """Vocabulary file instead of the packaged GPT-2 one; needs vocab_bpe too."""
    vocab_bpe: Path | None = None
    """Merges file instead of the packaged GPT-2 one; needs encoder_json too."""


# ------------------------------------------------------------------------------------------------ training


class ModelSettings(Section):
    """Architecture of a GPT-2."""

    n_layer: PositiveInt
    """Transformer blocks."""
    n_head: PositiveInt
    """Attention heads; divides n_embd."""
    n_embd: PositiveInt
    """Width of the residual stream."""
    seq_len: PositiveInt = 1024
    """Tokens of context."""
    vocab_size: PositiveInt = 50257
    """True vocabulary; padding to a multiple of 128 x tensor_parallel is the layout's business."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Dropout on embeddings, attention weights and residual branches while training."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        return self


class ParallelSettings(Section):
    """How a model is spread: world size = data x tensor."""

    tensor: PositiveInt = 1
    """Tensor-parallel ranks; divides n_head."""
    data: PositiveInt = 1
    """Data-parallel ranks."""


class TrainSettings(Section):
    """Optimisation."""

    iterations: PositiveInt
    """Optimiser steps."""
    micro_batch_size: PositiveInt = 4
    """Samples in one forward pass of one data-parallel rank."""
    global_batch_size: PositiveInt = 8
    """Samples an optimiser step; micro_batch_size x data x accumulation."""
    lr: PositiveFloat = 1.5e-4
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 1e-5
    """Learning rate at the end of the cosine, and after it."""
    warmup: Share = 0.01
    """Share of the iterations over which the learning rate rises."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW decay of matrices; none on biases and LayerNorm."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's exponential averages."""
    eps: PositiveFloat = 1e-8
    """AdamW's denominator term."""
    clip_grad: PositiveFloat = 1.0
    """Largest norm of the global gradient."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 autocast on GPUs that have it, else float32; parameters are always float32."""
    seed: Annotated[int, Field(ge=0)] = 1234
    """Seed of the initial weights, dropout and data order."""
    split: str = "949,50,1"
    """Documents for training, validation and test, in proportion."""
    log_interval: PositiveInt = 100
    """Iterations between two log lines."""
    eval_interval: PositiveInt = 1000
    """Iterations between two validation runs; one more happens at the end."""
    eval_batches: PositiveInt = 10
    """Global batches in a validation run (the whole split where it is smaller)."""
    save_interval: PositiveInt = 1000
    """Iterations between two checkpoints; one more is written at the end."""


class ModelRun(Section):
    """One model to train: `train_<name>` and `merge_<name>` are its targets."""

    model: ModelSettings
    """Architecture."""
    parallel: ParallelSettings = ParallelSettings()
    """Layout."""
    train: TrainSettings
    """Optimisation."""
    time_limit_minutes: PositiveInt = 24 * 60
    """Wall-clock limit of one job."""

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self.parallel.data * self.parallel.tensor

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.model.n_head % self.parallel.tensor:
            raise ValueError(
                f"parallel.tensor {self.parallel.tensor} does not divide model.n_head {self.model.n_head}; "
                "choose a divisor"
            )
        step = self.train.micro_batch_size * self.parallel.data
        if self.train.global_batch_size % step:
            raise ValueError(
                f"train.global_batch_size {self.train.global_batch_size} is not a multiple of "
                f"train.micro_batch_size {self.train.micro_batch_size} x parallel.data {self.parallel.data} = {step}"
            )
        return self


class ClusterSettings(Section):
    """Where training jobs run (`python -m cluster.submit`)."""

    executor: Literal["local", "slurm"] = "local"
    """local: processes on this machine; slurm: sbatch."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs of a node, one process each; 0 trains on CPUs."""
    tasks_per_node: PositiveInt = 8
    """Processes a node takes when it has no GPUs."""
    cpus_per_task: PositiveInt = 1
    """CPU cores of a process."""
    mem_gb_per_task: PositiveInt = 8
    """Memory of a process, in GB (Slurm only)."""
    partition: str = ""
    """Slurm partition; empty for the cluster's default."""
    account: str = ""
    """Slurm account; empty for the user's default."""


class GenerateSettings(Section):
    """The sample that `all` ends with."""

    prompt: str = "The"
    """Text to continue."""
    max_tokens: PositiveInt = 64
    """Tokens to add."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=0)] = 40
    """Choose among the k likeliest tokens; 0 for all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Choose among the likeliest tokens that make up this probability."""
    seed: Annotated[int, Field(ge=0)] = 1
    """Seed of the sampling."""


# ------------------------------------------------------------------------------------------------ the whole


def closest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'clean'?)`, or nothing when no known name is near."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _found(key: str, patterns: Iterable[str]) -> list[str]:
    """What the globs under a key match, sorted by each. ValueError for one that matches nothing."""
    names: list[str] = []
    for pattern in patterns:
        found = sorted(glob(pattern, recursive=True))
        if not found:
            raise ValueError(f"{key}: {pattern}: no such file or folder")
        names += found
    return names


class Settings(Section):
    """A whole run: one URL list, one corpus, any number of models."""

    run: Path
    """Folder of all results."""
    urls: list[str] = []
    """URL lists: files, folders or globs."""
    sources: list[SourceSettings] = []
    """Existing text, beside or instead of URLs: a list of {path, format, text_key}."""
    site: Path | None = None
    """Folder of a recorded site (see demo/): the scrape step serves it on loopback and fetches every URL from it. Leave
    out to fetch from the web."""
    shards: PositiveInt = 1
    """Shards of the corpus; fixes the order of documents and nothing else."""
    max_bad_share: Share = 0.001
    """Largest share of unreadable lines in an input before a step fails."""
    train_models: list[str] = []
    """Models that `snakemake all` trains; every other one has its `train_<name>` target."""
    blacklist: BlacklistSettings = BlacklistSettings()
    """URL rules."""
    scrape: ScrapeSettings = ScrapeSettings()
    """Fetching and extraction."""
    clean: CleanSettings = CleanSettings()
    """Text repair and filters."""
    dedup: DedupSettings = DedupSettings()
    """Deduplication."""
    decontaminate: DecontaminateSettings = DecontaminateSettings()
    """Overlap with evaluation sets."""
    tokenize: TokenizeSettings = TokenizeSettings()
    """Encoding."""
    models: dict[str, ModelRun] = {}
    """Models by name."""
    cluster: ClusterSettings = ClusterSettings()
    """Where training runs."""
    generate: GenerateSettings = GenerateSettings()
    """The closing sample."""

    @field_validator("models")
    @classmethod
    def _names_are_words(cls, models: dict[str, ModelRun]) -> dict[str, ModelRun]:
        for name in models:
            if not name.isidentifier():
                raise ValueError(f"model name {name!r} must be letters, digits and underscores")
        return models

    @model_validator(mode="after")
    def _something_goes_in(self) -> Self:
        if not self.urls and not self.sources:
            raise ValueError("give URL lists under `urls`, existing text under `sources`, or both")
        return self

    @model_validator(mode="after")
    def _trained_models_exist(self) -> Self:
        for name in self.train_models:
            self.model_run(name)
        return self

    def model_run(self, name: str) -> ModelRun:
        """The model called `name`; ConfigError (a ValueError inside validation) names the closest one."""
        if name not in self.models:
            raise ValueError(f"no model {name!r} under models{closest(name, self.models)}")
        return self.models[name]

    def url_files(self) -> list[str]:
        """The URL lists with globs resolved. ValueError for one that is not there.

        The list of a recorded site may be absent: a rule may have yet to make it.
        """
        names: list[str] = []
        for entry in self.urls:
            found = sorted(glob(entry, recursive=True))
            if not found and self.site is not None and Path(entry).is_relative_to(self.site):
                found = [entry]
            if not found:
                raise ValueError(f"urls: {entry}: no such file or folder; put the URL lists there, or change the key")
            names += found
        return names

    def source_files(self) -> list[str]:
        """The files and folders of existing text, globs resolved. ValueError for one that is not there."""
        return _found("sources", [source.path for source in self.sources])

    def evaluation_files(self) -> list[str]:
        """The evaluation sets with globs resolved. ValueError for one that is not there."""
        return _found("decontaminate.files", self.decontaminate.files)

    @property
    def dataset_prefix(self) -> Path:
        """PREFIX of the corpus' `.bin/.idx`, the form everything after merge_index takes."""
        return self.run / "dataset" / "corpus_text_document"

    def run_folder(self, name: str) -> Path:
        """Folder of one model's training run: checkpoints, logs, curves."""
        return self.run / "models" / name
