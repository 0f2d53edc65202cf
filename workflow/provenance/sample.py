"""Show a random, reproducible sample of the documents that a step kept or dropped.

    python -m workflow.provenance.sample results/demo/clean/0000.jsonl.zst --n 5
    python -m workflow.provenance.sample results/demo/clean --reason language --n 20
    python -m workflow.provenance.sample results/demo/clean --domain corner.example --before

PATH is a shard, a file of rejects, or a step's folder. --dropped and --reason read the rejects
beside the shards. The sample is the N documents with the smallest hashes of id and --seed. --before
shows which lines the step changed, from the earlier steps of the same run.
"""

import sys
from collections.abc import Iterator, Sequence
from difflib import unified_diff
from heapq import nsmallest
from pathlib import Path
from textwrap import shorten
from typing import Any

import orjson
import xxhash

from common import cli, steps
from common.errors import EmptyResultError, InputError
from common.files import MARK, Document, read_json_lines
from corpus.urls.url import parse_url

_REJECTS = ("rejects", "removed")  # folders; the second is dedup's
_CHARACTERS = 300  # shown of a text
_WIDTH, _LINES = 110, 20  # of a diff


def read_any(path: Path) -> Iterator[Document]:
    """The documents of a shard or of rejects; rejects of a scrape have only a URL.

    Raises InputError for a line that is no JSON object.
    """
    for number, line in enumerate(read_json_lines(path), start=1):
        try:
            document = orjson.loads(line)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict):
            raise InputError(f"{path}:{number}: not a JSON object; name a shard of documents or rejects")
        yield document


def rejects_beside(shard: Path) -> list[Path]:
    """The file of the documents that were dropped from a shard, if there is one."""
    return [path for name in _REJECTS if (path := shard.parent / name / shard.name).is_file()]


def files_of(path: Path, dropped: bool) -> list[Path]:
    """The files to read for a shard, rejects or a folder. Raises InputError if there are none."""
    if path.is_dir():
        folders = [path / name for name in _REJECTS] if dropped else [path]
        files = sorted(file for folder in folders for file in folder.glob("*.jsonl.zst"))
    else:
        files = (rejects_beside(path) if dropped else []) or [path]
    if not files or not files[0].is_file():
        what = "rejects" if dropped else "shards (*.jsonl.zst)"
        raise InputError(f"{path}: no {what} here; name a step's file or folder")
    return files


def matches(document: Document, reason: str, domain: str, name: str) -> bool:
    """Whether a document has this reason, domain and start of its id; empty values match all."""
    if domain:
        try:
            host = parse_url(str(document.get("url"))).host
        except ValueError:
            return False
        if not f".{host}".endswith(f".{domain}"):
            return False
    return reason in ("", document.get("reason")) and str(document.get("id", "")).startswith(name)


def texts_before(shard: Path, names: set[str]) -> dict[str, str]:
    """The texts of documents before a step of a run, from the nearest earlier step with them."""
    folder = shard.parent.parent if shard.parent.name in _REJECTS else shard.parent
    folders = list(dict.fromkeys(step.folder for step in steps.CORPUS if step.unit))
    earlier = folders[: folders.index(folder.name)] if folder.name in folders else []
    texts: dict[str, str] = {}
    for path in (folder.parent / name / shard.name for name in reversed(earlier)):
        if path.is_file() and names - texts.keys():
            texts |= {d["id"]: d["text"] for d in read_any(path) if d["id"] in names - texts.keys()}
    return texts


def plain(text: str, width: int = _CHARACTERS) -> str:
    """The beginning of a text on one line, without control characters."""
    return shorten("".join(c if c.isprintable() else " " for c in text[: 4 * width]), width, placeholder=" …")


def source_of(document: Document) -> str:
    """The URL of a document, or FILE:LINE of own text."""
    return str(document.get("url") or document.get("origin") or "")


def fate(document: Document) -> str:
    """`kept`, or which step dropped a document and why."""
    if MARK not in document:
        return "kept"
    survivor = f", a duplicate of {document['survivor']}" if "survivor" in document else ""
    survivor += f", similarity {document['similarity']:.2f}" if "similarity" in document else ""
    detail = document.get("detail") or (f"{document['tokens']} tokens" if "tokens" in document else "")
    return f"dropped by {document[MARK]}: {document['reason']}{f' ({detail})' if detail else ''}{survivor}"


def _described(document: Document, before: str | None) -> Iterator[str]:
    origin = f"  {plain(str(document['origin']))}" if document.get("url") and document.get("origin") else ""
    yield f"{document.get('id', '-')}  {plain(source_of(document))}{origin}\n  {fate(document)}"
    text = document.get("text", before or "")
    if before is None or before == text:
        yield f"  {'' if before is None else 'unchanged: '}{plain(text)}"
        return
    changes = list(unified_diff(before.splitlines(), text.splitlines(), n=0, lineterm=""))[2:]
    changed = [line for line in changes if not line.startswith("@@")]
    yield f"  {len(before):,} -> {len(text):,} characters, {len(changed)} changed lines"
    yield from (f"  {line[0]} {plain(line[1:], _WIDTH)}" for line in changed[:_LINES])


def sample(files: Sequence[Path], n: int, seed: int, **wanted: str) -> list[tuple[Path, Document]]:
    """Up to `n` matching documents, each with its file. Raises EmptyResultError without any."""
    candidates = ((path, document) for path in files for document in read_any(path) if matches(document, **wanted))

    def order(item: tuple[Path, Document]) -> tuple[int, str]:
        name = str(item[1].get("id") or item[1].get("url"))
        return xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()), name

    if not (smallest := nsmallest(n, candidates, key=order)):
        raise EmptyResultError(f"{files[0]}{' …' if len(files) > 1 else ''}: no such document")
    return smallest


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("workflow.provenance.sample", __doc__)
    parser.add_argument("path", type=cli.input_path, metavar="PATH", help="shard, rejects, or a step's folder")
    parser.add_argument("--n", type=cli.positive_int, default=10, metavar="N", help="how many (default 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, another sample")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--kept", action="store_true", help="kept documents (default)")
    kind.add_argument("--dropped", action="store_true", help="dropped documents")
    parser.add_argument("--reason", default="", metavar="R", help="only those dropped for this reason")
    parser.add_argument("--domain", default="", metavar="D", help="only those of this host and its subdomains")
    parser.add_argument("--id", default="", metavar="ID", help="only those whose id begins with this")
    parser.add_argument("--before", action="store_true", help="also show what the step changed")
    parser.add_argument("--json", action="store_true", help="JSON lines, with `before` if asked for")
    arguments = parser.parse_args(argv)
    if arguments.kept and arguments.reason:
        parser.error("--reason is for dropped documents")
    files = files_of(arguments.path, arguments.dropped or bool(arguments.reason))
    wanted = {"reason": arguments.reason, "domain": arguments.domain.lower(), "name": arguments.id}
    chosen = sample(files, arguments.n, arguments.seed, **wanted)
    before: dict[str, str] = {}
    if arguments.before:
        for path in {path for path, _ in chosen}:
            before |= texts_before(path, {d["id"] for shard, d in chosen if shard == path and "id" in d})
    for _, document in chosen:
        old = before.get(document.get("id", ""))
        if arguments.json:
            more: dict[str, Any] = {} if old is None else {"before": old}
            print(orjson.dumps({**document, **more}).decode())
        else:
            print("\n".join(_described(document, old)), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
