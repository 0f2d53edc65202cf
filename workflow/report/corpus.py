"""Figures about the corpus (hosts, languages, lengths, duplicates), and sample documents."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from common import steps as table
from common.files import read_json
from common.page import COLORS, WIDTH, as_svg, figure_style
from common.settings import Settings
from common.tokenizer import Tokenizer
from common.vocabulary import vocabulary_files
from corpus.index import IndexedDataset, suffixed
from corpus.index.documents import DocumentTable, Row
from corpus.index.layout import DOCUMENTS
from workflow.report.funnel import FunnelStep

_LUMPED = 4  # cluster sizes from here on are grouped by powers of two
_NAMED = 20  # hosts, and values of a key of `meta`, in a table
_BARS = 4  # a chart of fewer says no more than its table
_SHARDS, _DOCUMENTS = 20, 20  # of more shards, some that are evenly spaced
_TOKENS, _CHARACTERS = 200, 500  # shown of a document: 20 * 20 * 500 characters = 200 kB


class Host(NamedTuple):
    """Counts of a host's documents by outcome."""

    name: str
    arrived: int
    """URLs to fetch, or documents that ingest read."""
    kept: int
    tokens: int

    @property
    def dropped(self) -> int:
        """Documents that are not in the dataset."""
        return self.arrived - self.kept


@dataclass(frozen=True)
class Corpus:
    """Figures about the corpus. A part is empty if the step that counts it has not run."""

    hosts: list[Host]
    """The largest, then `others`.

    Each shard names its 20 with the most URLs and its 50 with the most documents.
    """
    languages: list[tuple[str, int]]
    """Documents by ISO 639-1 code, the most frequent first."""
    lengths: list[tuple[str, int, int]]
    """(bytes, documents into clean, documents out of dedup)."""
    token_lengths: list[tuple[str, int]]
    """(tokens, documents of the dataset)."""
    clusters: list[tuple[str, int]]
    """(documents in a cluster, clusters)."""
    largest: dict[str, Any] | None
    """The largest cluster: `documents`, `lowest_similarity` to the kept document, some `ids`."""
    near: list[tuple[dict[str, Any], dict[str, Any]]]
    """Some near duplicates with their `similarity`, and the kept ones; the least similar first.

    Their texts are HTML, see `marked`.
    """
    kept_by: tuple[list[str], list[tuple[str, str, list[int], int]]]
    """Steps, and rows of (key of `meta`, value, documents out of each step, tokens of the last).

    A key has its 20 most frequent values.
    """

    @property
    def charts(self) -> list[tuple[str, Markup]]:
        """Captions and drawings of the histograms with enough bars."""
        names = [name for name, *_ in self.lengths]
        both = [("into clean", [row[1] for row in self.lengths]), ("out of dedup", [row[2] for row in self.lengths])]
        histograms = [("lengths", "Documents by length", names, both, "bytes of text, from", "documents")]
        for name, caption, rows, axis, unit in (
            ("tokens", "Documents by tokens", self.token_lengths, "tokens, from", "documents"),
            ("clusters", "Clusters of duplicates by size", self.clusters, "documents in a cluster", "clusters"),
        ):
            sizes, counts = [size for size, _ in rows], [count for _, count in rows]
            histograms.append((name, caption, sizes, [("", counts)], axis, unit))
        return [(each[1], _histogram(*each)) for each in histograms if len(each[2]) >= _BARS]


def _histogram(
    name: str, label: str, bins: Sequence[str], series: Sequence[tuple[str, Sequence[int]]], axis: str, unit: str
) -> Markup:
    """Groups of bars: a group per bin, a bar per series; logarithmic if counts are far apart."""
    titles: dict[str, str] = {}
    with figure_style(name):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, 2.7), layout="constrained")
        width = 0.8 / len(series)
        for number, (kind, counts) in enumerate(series):
            lefts = [place - 0.4 + number * width for place in range(len(bins))]
            drawn = axes.bar(lefts, counts, width=width * 0.94, align="edge", color=COLORS[number], label=kind)
            for place, (bar, count) in enumerate(zip(drawn, counts, strict=True)):
                bar.set_gid(f"bar-{number}-{place}")
                titles[f"bar-{number}-{place}"] = f"{bins[place]}: {count:,} {unit}" + f", {kind}" * (len(series) > 1)
        counts_above_0 = [count for _, counts in series for count in counts if count]
        if counts_above_0 and max(counts_above_0) > 100 * min(counts_above_0):
            axes.set_yscale("log")
            axes.set_ylim(bottom=0.5)
        many = len(bins) > 8
        axes.set_xticks(
            range(len(bins)), bins, fontsize=9, rotation=60 if many else 0, ha="right" if many else "center"
        )
        axes.tick_params(bottom=False)
        axes.set_xlabel(axis, fontsize=9)
        axes.set_ylabel(unit, fontsize=9)
        axes.grid(axis="y")
        if len(series) > 1:
            figure.legend(loc="outside upper right", ncols=2, fontsize=9)
        return as_svg(figure, label, titles)


def _power(value: int) -> str:
    """`2 Ki`: sizes are powers of two."""
    for unit in ("", "Ki", "Mi"):
        if value < 1024:
            return f"{value} {unit}".strip()
        value //= 1024
    return f"{value} Gi"


def _cluster_sizes(sizes: dict[str, int]) -> list[tuple[str, int]]:
    grouped: Counter[int] = Counter()
    for size, count in ((int(size), count) for size, count in sizes.items()):
        grouped[size if size < _LUMPED else 1 << (size.bit_length() - 1)] += count
    return [(str(size) if size < _LUMPED else f"{size} to {2 * size - 1}", grouped[size]) for size in sorted(grouped)]


def _tokens(step: FunnelStep, size: int) -> int:
    """The tokens in bytes of a token file."""
    return size * (step.tokens or 0) // (step.bytes_out or 1)


def _hosts(by_name: dict[str, FunnelStep]) -> list[Host]:
    """The largest hosts, and all others together."""
    scrape, ingest, end = (by_name.get(name, FunnelStep("", "")) for name in ("scrape", "ingest", "tokenize"))
    arrived = Counter(scrape.counts.get("hosts", {}))
    arrived.update({host: each["documents"] for (key, host), each in ingest.kept_by.items() if key == "host"})
    named = sorted(arrived, key=lambda host: (-arrived[host], host))[:_NAMED]
    kept = [end.kept_by.get(("host", host), Counter[str]()) for host in named]
    hosts = [
        Host(name, arrived[name], each["documents"], _tokens(end, each["bytes"]))
        for name, each in zip(named, kept, strict=True)
    ]
    others = Host(
        "others",
        scrape.documents_in + ingest.documents_out - sum(host.arrived for host in hosts),
        end.documents_out - sum(host.kept for host in hosts),
        (end.tokens or 0) - sum(host.tokens for host in hosts),
    )
    return [*hosts, others] if hosts and others.arrived else hosts


def _kept_by(steps: Sequence[FunnelStep]) -> tuple[list[str], list[tuple[str, str, list[int], int]]]:
    """The table of `Corpus.kept_by`, from clean on; a key's last row has all other documents."""
    names = [step.name for step in steps]  # before clean, most documents have no meta
    first = names.index("clean") if "clean" in names else 0
    counted = [step for step in steps[first:] if step.kept_by]
    rows = []
    for key in sorted({key for step in counted for key, _ in step.kept_by} - {"host"}):
        total: Counter[str] = Counter()
        for step in counted:
            total.update({value: each["documents"] for (name, value), each in step.kept_by.items() if name == key})
        named = sorted(total, key=lambda value: (-total[value], value))[:_NAMED]
        cells = [[step.kept_by.get((key, value), Counter[str]()) for step in counted] for value in named]
        of_key = [
            (key, value, [cell["documents"] for cell in row], _tokens(counted[-1], row[-1]["bytes"]))
            for value, row in zip(named, cells, strict=True)
        ]
        rest = [step.documents_out - sum(row[2][n] for row in of_key) for n, step in enumerate(counted)]
        if any(rest):
            tokens = (counted[-1].tokens or 0) - sum(row[3] for row in of_key)
            of_key.append((key, "others, or none given", rest, tokens))
        rows += of_key if len(of_key) > 1 else []  # one value says nothing
    return [step.name for step in counted], rows


def marked(document: Mapping[str, Any], other: Mapping[str, Any]) -> Markup:
    """The text of a document as HTML, with <mark> around the words that differ from the other's."""
    ours, theirs = (re.findall(r"\s*\S+\s*", each.get("text", "")) for each in (document, other))
    words, others = ([word.strip() for word in each] for each in (ours, theirs))
    codes = SequenceMatcher(None, others, words, autojunk=False).get_opcodes()
    parts = [(code, "".join(ours[start:end])) for code, *_, start, end in codes if start < end]
    return Markup().join(text if code == "equal" else Markup("<mark>{}</mark>").format(text) for code, text in parts)


def corpus_figures(run: Path, steps: Sequence[FunnelStep]) -> Corpus:
    """The figures in the statistics of a run's steps."""
    by_name = {step.name: step for step in steps}
    counts = {name: step.counts for name, step in by_name.items()}
    before, languages = (counts.get("clean", {}).get(name, Counter[str]()) for name in ("sizes_in", "languages"))
    after = counts.get("dedup", {}).get("sizes_out", Counter[str]())
    tokens = counts.get("tokenize", {}).get("token_lengths", Counter[str]())
    clusters = table.result("dedup_clusters", run)
    figures = read_json(clusters, "delete it: snakemake makes it again") if clusters.exists() else {}
    pairs = [pair for pair in figures.get("near", []) if len(pair) == 2]  # else one was removed
    near = [(one | {"text": marked(one, two)}, two | {"text": marked(two, one)}) for one, two in pairs]
    return Corpus(
        hosts=_hosts(by_name),
        languages=languages.most_common(),
        lengths=[(_power(int(size)), before[size], after[size]) for size in sorted({*before, *after}, key=int)],
        token_lengths=[(_power(int(size)), tokens[size]) for size in sorted(tokens, key=int)],
        clusters=_cluster_sizes(figures.get("cluster_sizes", {})),
        largest=figures.get("largest_cluster"),
        near=sorted(near, key=lambda pair: pair[0]["similarity"]),
        kept_by=_kept_by(steps),
    )


def kept_documents(settings: Settings) -> list[tuple[str, list[dict[str, Any]]]]:
    """Shards of the dataset, each with the beginnings of its documents with the smallest ids."""
    prefix = settings.dataset_prefix
    if not suffixed(prefix, DOCUMENTS).is_file():
        return []
    table, index = DocumentTable(prefix), IndexedDataset(prefix)
    tokenizer = Tokenizer(vocabulary_files(settings.tokenize.encoder_json, settings.tokenize.vocab_bpe))
    ends = np.cumsum([documents for _, documents in table.shards])
    shown = []
    for number in sorted({*np.linspace(0, len(ends) - 1, _SHARDS).astype(int).tolist()}):
        name, documents = table.shards[number]
        first = int(ends[number]) - documents
        ids = table.ids[first : first + documents]
        order = np.argsort(ids, kind="stable")
        rows = [table[first + row] for row in order[ids[order] > 0][:_DOCUMENTS].tolist()]  # 0: removed
        shown.append((name, [_shown(row, index.document(row.number).tolist(), tokenizer) for row in rows]))
    return [(name, documents) for name, documents in shown if documents]


def _shown(row: Row, tokens: list[int], tokenizer: Tokenizer) -> dict[str, Any]:
    text = tokenizer.decode(tokens[:_TOKENS])[:_CHARACTERS]
    return {"id": row.id, "url": row.url, "tokens": len(tokens), "text": text}
