"""Trace a document through all steps of a run: its source, what each step changed, its tokens.

    python -m workflow.provenance.show 302544148050df60 --run results/demo
    python -m workflow.provenance.show https://corner.example/archiv-bei-nacht --run results/demo

A document is named by URL, id or the beginning of its id; existing text also by file (its first
document), FILE:LINE, or the end of such a path. URLs, and ids of existing text, determine the
shard; otherwise all shards are searched. After that, one shard per step is read.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import cli, steps
from common.errors import InputError
from common.files import MARK, Document, read_lines, shard_name
from common.settings import Settings
from common.tokenizer import Tokenizer
from common.vocabulary import vocabulary_files
from corpus.index import IndexedDataset, suffixed
from corpus.index.documents import DocumentTable
from corpus.urls.rules import UrlRules
from corpus.urls.url import document_id
from workflow.provenance.sample import fate, plain, read_any, rejects_beside
from workflow.runs import load_run

_FIRST = ("blacklist", "scrape", "ingest")  # where documents come from


@dataclass(frozen=True)
class Found:
    """A document in a file of a step."""

    document: Document
    path: Path
    number: int
    """Documents before it in that file: 0 for the first."""


def find(paths: Sequence[Path], wanted: Callable[[Document], bool]) -> Found | None:
    """The first document that is `wanted`."""
    for path in filter(Path.is_file, paths):
        for number, document in enumerate(read_any(path)):
            if wanted(document):
                return Found(document, path, number)
    return None


def _id(document: Document) -> str:
    """The id; dropped URLs have none, so it is computed."""
    try:
        return str(document.get("id") or document_id(str(document["url"])))
    except ValueError:  # not a URL
        return ""


def _files(run: Path, step: steps.Step, shard: int) -> list[Path]:
    """The paths of a step's kept documents and rejects of a shard; they need not exist."""
    if step.name == "blacklist":
        return [run / step.rejects]
    path = run / step.folder / f"{shard_name(shard)}.jsonl.zst"
    return [path, *rejects_beside(path)]


def _url_line(path: Path, name: str) -> int:
    """The line number of a document's URL in a list; 0 if it is not there."""
    lines = enumerate(read_lines(path), start=1) if path.is_file() else ()
    return next((number for number, url in lines if _id({"url": url.decode("utf-8", "replace")}) == name), 0)


def locate(settings: Settings, wanted: str) -> tuple[Document, int]:
    """A document as the first step wrote it, and its shard. Raises InputError if no step has it."""
    run = settings.run
    shards: Sequence[int] = range(settings.shards)
    name, kind = wanted.lower(), "id"
    if "://" in wanted:
        kind = "URL"
        try:
            name = document_id(wanted)
        except ValueError as error:
            raise InputError(f"{wanted}: not a URL ({error})") from None
        *_, shard, _ = UrlRules(settings.blacklist, settings.shards).judge_one(wanted)
        shards = [shard, int(name, 16) % settings.shards]  # of a page, of existing text
    elif re.fullmatch("[0-9a-f]{16}", name):
        shards = sorted(shards, key=lambda shard: shard != int(name, 16) % settings.shards)
    elif not re.fullmatch("[0-9a-f]{1,15}", name):
        kind = "file"

    def is_it(document: Document) -> bool:
        if kind != "file":
            return _id(document).startswith(name)
        line, end = f"/{document.get('origin', '')}", f"/{wanted.lstrip('/')}"
        return line.endswith(end) or line.rpartition(":")[0].endswith(end)

    first = [step for step in steps.configured(settings) if step.name in _FIRST]
    for step in reversed(first):  # blacklist last: all shards have the same rejects
        for shard in shards:
            if match := find(_files(run, step, shard), is_it):
                return match.document, shard
    raise InputError(f"{wanted}: no document of {run} has this {kind}, kept or dropped")


def show(settings: Settings, wanted: str) -> Iterator[str]:
    """One line per step of a run: what it did with a document. Raises InputError without any."""
    run, (first, shard) = settings.run, locate(settings, wanted)
    name = _id(first)

    def is_it(document: Document) -> bool:  # two files with the same text have the same id
        return _id(document) == name and document.get("origin", origin) == origin

    origin = first.get("origin")
    yield f"{name}, shard {shard_name(shard)} of {run}"
    list_path, archive = (run / f"urls/{shard_name(shard)}.txt", run / f"pages/{shard_name(shard)}.warc.gz")
    line = _url_line(list_path, name)
    before: Found | None = None
    for step in steps.configured(settings):
        if step.name == "blacklist" and line:
            yield _row(step.name, f"kept: line {line:,} of {list_path.relative_to(run)}")
        elif step.name == "tokenize" and before is not None:
            yield from _tokens(settings, shard, before, is_it)
        elif step.unit and (match := find(_files(run, step, shard), is_it)):
            where = f"document {match.number:,} of {match.path.relative_to(run)}"
            yield _row(step.name, f"{fate(match.document)}; {where}")
            if step.name == "scrape" and archive.is_file():
                yield _row("", f"responses: {archive.relative_to(run)}")
            yield from (_row("", line) for line in _details(match.document, before))
            if MARK in match.document:
                return
            before = match
        elif step.unit and before is not None and step.name not in (*_FIRST, "merge_index"):
            made = _files(run, step, shard)[0].is_file()
            last = before.path.relative_to(run)
            yield _row(step.name, "not there: made from other input" if made else f"not done yet; last seen in {last}")
            return


def _row(step: str, text: str) -> str:
    return f"{step:<14} {text}"


def _details(document: Document, before: Found | None) -> Iterator[str]:
    text = document.get("text")
    if before is None:
        for key in ("url", "final_url", "origin", "title", "date", "extractor", "source_id", "meta"):
            if document.get(key) and (key != "final_url" or document[key] != document["url"]):
                yield f"{key}: {plain(str(document[key]))}"
    if text is not None and (before is None or before.document["text"] != text):
        old = "" if before is None else f"{len(before.document['text']):,} -> "
        yield f"{old}{len(text):,} characters: {plain(text, 80)}"


def _tokens(settings: Settings, shard: int, last: Found, is_it: Callable[[Document], bool]) -> Iterator[str]:
    """The positions of a document's tokens in its shard and in the dataset, or why it has none."""
    run, name = settings.run, shard_name(shard)
    rejects, tokens = run / steps.named("tokenize").rejects.format(shard=name), run / f"tokens/{name}_text_document"
    if not suffixed(tokens, ".idx").is_file():
        yield _row("tokenize", f"not done yet; last seen in {last.path.relative_to(run)}")
        return
    if match := find([rejects], is_it):
        yield _row("tokenize", fate(match.document))
        return
    for step, prefix in (("tokenize", tokens), ("merge_index", settings.dataset_prefix)):
        if not suffixed(prefix, ".idx").is_file():
            break
        table, index = DocumentTable(prefix), IndexedDataset(prefix)
        rows = [number for number in table.of_ids([last.document["id"]]) if table[number].shard == name]
        if not rows:
            yield _row(step, "not there: made from other input")
            return
        first, ids = int(index.pointers[rows[0]]) // index.dtype.itemsize, index.document(rows[0]).tolist()
        tokens_of = f"document {rows[0]:,}, tokens {first:,} to {first + len(ids) - 1:,} ({len(ids):,})"
        yield _row(step, f"kept; {tokens_of} of {prefix.relative_to(run)}")
    tokenizer = Tokenizer(vocabulary_files(settings.tokenize.encoder_json, settings.tokenize.vocab_bpe))
    text = tokenizer.decode(ids)
    same = text.removesuffix("<|endoftext|>") == last.document["text"]
    yield _row("", f"decoded, they are {'the' if same else 'another'} text: {plain(text, 80)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("workflow.provenance.show", __doc__)
    parser.add_argument("document", metavar="ID", help="id, its beginning, URL, or FILE[:LINE]")
    parser.add_argument("--run", type=cli.input_path, required=True, metavar="DIR", help="folder of the run")
    arguments = parser.parse_args(argv)
    for line in show(load_run(arguments.run), arguments.document):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
