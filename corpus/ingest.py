"""Turn existing text into documents of the corpus, without a scrape.

    python -m corpus.ingest --input dump.jsonl.gz --text-key content --output documents.jsonl.zst
    python -m corpus.ingest --input texts/ wiki/AA --output-dir ingest --shards 64
    python -m corpus.ingest --input CC-MAIN-1.warc.gz --output-dir ingest --shards 64 --workers 4
    python -m corpus.ingest --config config.yaml --output-dir ingest --shards 64

Inputs are files, folders or globs; without --input, the `sources` of the configuration. The format
of a file is what its content and its name say, unless one is given:

    jsonl           one JSON object per line, its text under --text-key
    text            *.txt: one document per file
    wikiextractor   <doc id url title> … </doc>, or that program's JSON lines
    csv             *.csv, *.tsv: a header and rows, the text in the column --text-key
    parquet, arrow  files and folders of Hugging Face datasets (the train split), text in --text-key
    documents       *.documents.jsonl: shards that a step of this toolkit wrote
    warc            the pages of responses, extracted as by corpus.scrape; the texts of WET files

A document's id is a hash of its canonical URL, or of its text if it has no URL; its shard is a
function of its id. Shards keep the order of the input, and the worker count changes no byte. Of
objects and rows, url and title are kept, id becomes `source_id`, and all others (date, license, …)
go under `meta`, at most 65,536 bytes per document.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Unpack

from common import cli
from common.errors import InputError
from common.files import (
    Document,
    check_outputs,
    expand_inputs,
    is_binary,
    read_json,
    removed_ids,
    sharded_writer,
    short_hash,
)
from common.settings import BlacklistSettings, ScrapeSettings, SourceSettings
from common.stats import Stats
from corpus.remote.listing import fetched_sources, local, origin_in
from corpus.runner import Drop, Outcome, ShardStep, StepOptions, step_options
from corpus.scrape.offline import checked_pages, extracted
from corpus.scrape.pages import count_date
from corpus.sources.formats import FORMATS, READERS, recognised
from corpus.urls.url import document_id


def read_pages(
    scrape: ScrapeSettings, blacklist: BlacklistSettings, workers: int, stats: Stats, paths: Iterable[Path]
) -> Iterator[Outcome]:
    """The documents of WARC files, as `corpus.scrape --warc` extracts them, and drops."""
    for url, outcome in extracted(checked_pages(paths, scrape, blacklist, texts=True), scrape, workers):
        count_date(stats, outcome)
        yield Drop({"url": url}, outcome["reason"]) if "reason" in outcome else dict(outcome["record"])


def read_sources(
    sources: Sequence[SourceSettings],
    step: ShardStep,
    from_warc: Callable[[Iterable[Path]], Iterator[Outcome]],
    known: Iterable[Path] = (),
    origin: Callable[[str], str] = str,
) -> Iterator[Outcome]:
    """The documents of the sources, counted, without ids; files in the order of their names.

    Leaves out the inputs in the statistics `known`. `origin` turns FILE:LINE into what documents
    name. Raises InputError for a missing source, a file that is damaged or not what it seems to be,
    and a known file that has changed.
    """
    cure = "make it again: `snakemake -R ingest` with the configuration of that run"
    inputs = [read_json(path, cure)["inputs"].items() for path in known]
    earlier = {os.path.abspath(name): fingerprint for files in inputs for name, fingerprint in files}
    for source in sources:
        paths = step.new_files(dict.fromkeys(expand_inputs(source.patterns, "sources")), earlier)
        files = ((path, *recognised(path, source)) for path in paths)
        for is_warc, group in groupby(files, lambda file: file[1] == "warc"):
            texts = (
                READERS[format](path, exact, step.bad_files if format == "text" else step.bad)
                for path, format, exact in group
                if not is_warc
            )
            for document in from_warc(path for path, _, _ in group) if is_warc else chain.from_iterable(texts):
                fields = document.document if isinstance(document, Drop) else document
                if "origin" in fields:
                    fields["origin"] = origin(fields["origin"])
                if isinstance(document, Drop):
                    step.stats.documents_in += 1
                    yield document
                    continue
                if source.name:
                    document["meta"] = {"source": source.name, **document.get("meta", {})}
                yield from step.stats.counted([document])


def identify(removed: Collection[str], document: Outcome) -> Outcome:
    """Give a document its id; drop it if it has no text or its id was `removed`."""
    if isinstance(document, Drop):
        return document
    try:
        name = document_id(document["url"])
    except (KeyError, ValueError):  # no URL, or one that cannot be parsed
        name = short_hash(document["text"])
    if name in removed:
        return Drop({"id": name}, "removed")  # without its text and URL
    identified = {"id": name, **document}
    if is_binary(document["text"].lstrip()[:64].encode()):
        return Drop(identified, "binary")
    return identified if document["text"].strip() else Drop(identified, "empty")


@contextmanager
def shards_by_id(outputs: Sequence[Path], workers: int = 1) -> Iterator[Callable[[Document], object]]:
    """`sharded_writer` with the shard that a document's id names."""
    with sharded_writer(outputs, workers) as write:
        yield lambda document: write(int(document["id"], 16) % len(outputs), document)


def ingest(
    sources: Sequence[SourceSettings],
    outputs: Sequence[Path],
    known: Sequence[Path] = (),
    scrape: ScrapeSettings | None = None,
    blacklist: BlacklistSettings | None = None,
    removed: Collection[str] = (),
    origin: Callable[[str], str] = str,
    **options: Unpack[StepOptions],
) -> Stats:
    """Write the documents of all sources into shards, all of them or none, in bounded memory.

    Workers are threads that compress, because sending a document to a process takes longer than
    reading it, and processes that extract WARC pages by `scrape` and `blacklist`. Raises InputError
    for unreadable input, EmptyResultError if no document has text.
    """
    workers = options.pop("workers", 1)
    step = ShardStep("ingest", [source.path for source in sources], **options)
    from_warc = partial(read_pages, scrape or ScrapeSettings(), blacklist or BlacklistSettings(), workers, step.stats)
    documents = read_sources(sources, step, from_warc, known, origin)
    return step.run(partial(identify, removed), shards_by_id(outputs, workers), documents)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.ingest", __doc__)
    cli.add_input(parser, cli.lists, required=False)
    parser.add_argument("--glob", nargs="+", default=[], metavar="PATTERN", help="of the files below each input folder")
    parser.add_argument("--format", choices=["auto", *FORMATS], default="auto", help="of all inputs (auto)")
    parser.add_argument("--encoding", default="utf-8", metavar="NAME", help="of text, CSV and JSON lines (utf-8)")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="key or column with the text (text)")
    parser.add_argument("--skip-keys", nargs="+", default=[], metavar="KEY", help="keys or columns to leave out")
    parser.add_argument("--name", default="", metavar="NAME", help="the `meta.source` of documents that have none")
    cli.add_earlier(parser, "statistics of earlier runs of this step, whose inputs are left out")
    cli.add_output_shards(parser, "shard of documents", ".jsonl.zst")
    cli.add_step_options(parser, "sources")
    arguments = parser.parse_args(argv)
    outputs = cli.output_shards(arguments, ".jsonl.zst")
    settings = cli.read_settings(arguments)
    options = {key: getattr(arguments, key) for key in SourceSettings.model_fields if key in arguments}
    sources = [SourceSettings(path=path, **options) for path in arguments.input or ()]
    fetched = [] if sources else fetched_sources(settings)
    all_known = {source.key for source, listing in fetched if not listing.wanted}
    sources = sources or [
        source
        for source, given in zip(settings.local_sources, settings.sources, strict=True)
        if given.key not in all_known
    ]
    if not sources and not fetched:
        raise InputError("nothing to ingest: name --input, or a --config with `sources`")
    inputs = (path for source in sources for path in source.files)
    check_outputs([*outputs, arguments.rejects, arguments.stats], inputs)
    given = (sources, outputs, arguments.known, settings.scrape, settings.blacklist, removed_ids(arguments.removed))
    origin = origin_in(settings.fetch_folder, fetched)
    stats = ingest(*given, origin, **step_options(arguments, settings))
    if fetched:
        stats.extra["listings"] = {source.key: listing.identity for source, listing in fetched}
    stats.finish(arguments.stats)
    for source, listing in fetched:
        for file in () if source.keep else listing.wanted:
            local(settings.fetch_folder, source, file.name).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
