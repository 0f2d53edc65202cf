"""Remove documents from a run and everything made from it; name the checkpoints without them.

    python -m workflow.provenance.remove --urls takedown.txt --run results/demo
    python -m workflow.provenance.remove --urls takedown.txt --run results/demo --yes --by Ada

--urls names URLs or ids of documents, one per line; it includes pages that were redirected to them.
Without --yes the command only prints what it would remove. With --yes it removes the documents from
URL lists, pages, archives, journals, shards, rejects, examples and logs, and deletes the report and
the cards, which `snakemake` writes again. In datasets, each of their tokens becomes end-of-text (a
tombstone, which no loss counts), so that later samples keep their places. Duplicates that they
displaced stay out, also in runs that extend this one. Files below RUN/fetch are named, not edited.
Checkpoints that read one of them move to MODEL/withdrawn, for the run's models and those of
--model; training resumes from the newest checkpoint before the first read. A model of another run
that was not named cannot continue; repeat the command with --model. RUN/takedown/0001.json is the
record. After a kill, the next command with --yes finishes the removal.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path

from common import cli, run_card, steps
from common.errors import InputError
from common.files import REMOVED_IDS, locked_run, read_lines, removed_ids, write_json, write_text
from common.settings import DedupSettings
from common.workers import Workers
from corpus.dedup.signatures import identity_of, write_signatures
from corpus.index import content_of
from corpus.index.documents import DocumentTable, write_tombstones
from corpus.urls.url import document_id
from training.trace import Trace
from workflow.provenance.sample import read_any, source_of
from workflow.provenance.takedown import Removal, editor_of, redirected, remove_from
from workflow.provenance.withdraw import ModelPlan, Tombstones, plan_model, relative, withdraw
from workflow.runs import load_run, read_takedown

FOLDER = REMOVED_IDS.parent.name
_REBUILT = ("report.html", "cards/**/*", "dataset/*.ngrams")
# without entries of documents, or rebuilt; site is the demo's input, fetch that of ingest
_SKIPPED = ("records", FOLDER, "settings", "merged", "tokenizer", "site", "fetch", "report.html", "cards")
_SKIPPED_OF_MODEL = ("iter_", "snapshots", "trace", "withdrawn")
_SHOWN = 20


class Plan(Tombstones):
    """The effects of a removal. Paths are relative to the run; those outside it are absolute."""

    format: int
    ids: list[str]
    entries: dict[str, int]
    """Entries of the documents by file."""
    signatures: list[str]
    """Shards whose signatures are computed again."""
    models: dict[str, ModelPlan]
    displaced: list[dict[str, str]]
    """Documents that dedup dropped as duplicates of removed ones: they stay out."""
    survivors: list[str]
    """Documents that dedup kept instead of removed ones: they are kept."""
    times: dict[str, int]
    """Modification times in ns, which the edited files keep."""


def read_ids(path: Path) -> list[str]:
    """The ids of the documents that a file names. Raises InputError for a line without any."""
    ids = []
    for number, line in enumerate(read_lines(path), start=1):
        name = line.decode("utf-8", "replace").strip()
        if len(name) == 16 and set(name) <= set("0123456789abcdef"):
            ids.append(name)
        elif name:
            try:
                ids.append(document_id(name))
            except ValueError as error:
                raise InputError(f"{path}:{number}: neither a URL ({error}) nor the id of a document") from None
    if not ids:
        raise InputError(f"{path}: names no document; write one URL or id per line")
    return list(dict.fromkeys(ids))


def make_plan(run: Path, wanted: Iterable[str], models: Sequence[Path] = (), workers: int = 1) -> Plan | None:
    """Plan the removal of documents by their ids; None if all have been removed.

    Raises InputError if a run of `base` has them, if a model was not trained on this run, or if the
    run never had them.
    """
    removal = Removal(wanted)
    for base in load_run(run).base:
        if any(DocumentTable(path.with_suffix("")).of_ids(removal.ids) for path in base.glob("dataset/*.idx")):
            cure = f"remove them there first: --run {base} --model {run}/models/NAME"
            raise InputError(f"{base}: {run} extends it, and it has some of these documents; {cure}")
    for folder in models:
        if run.resolve() not in [prefix.parent.parent.resolve() for prefix in Trace(folder).prefixes]:
            raise InputError(f"--model {folder}: was not trained on data of {run}; name models that were")
    pages = sorted((run / steps.named("scrape").folder).glob("*.jsonl.zst"))
    removal = Removal([*removal.ids, *(name for path in pages for name in redirected(path, removal))])
    entries, tombstones = _count_entries(run, removal, workers), _tombstones(run, removal)
    records = [*map(read_takedown, sorted((run / FOLDER).glob("*.json"))), tombstones]
    folders = [path.parent for path in sorted(run.glob("models/*/settings.yaml"))]
    trained = {relative(run, folder): plan_model(run, folder, records) for folder in [*folders, *models]}
    if not (entries or tombstones["datasets"] or any(trained.values())):
        if removal.ids <= removed_ids([run / REMOVED_IDS]):
            return None
        raise InputError(f"{run}: no step has seen any of these documents")
    signed = [path.stem for path in sorted(run.glob("dedup/work/*.signatures"))]
    signatures = [name for name in signed if f"clean/{name}.jsonl.zst" in entries]
    edited = [*entries, *(f"dedup/work/{name}.signatures" for name in signatures)]
    edited += [prefix + suffix for prefix in tombstones["datasets"] for suffix in (".bin", ".json", ".docs")]
    displaced, survivors = _duplicates(run, removal)
    return {
        "format": 2,
        "ids": sorted(removal.ids),
        "entries": entries,
        "signatures": signatures,
        **tombstones,
        "models": {name: plan for name, plan in trained.items() if plan},
        "displaced": displaced,
        "survivors": survivors,
        "times": {name: (run / name).stat().st_mtime_ns for name in edited},
    }


def _tombstones(run: Path, removal: Removal) -> Tombstones:
    prefixes = [path.with_suffix("") for path in sorted([*run.glob("tokens/*.idx"), *run.glob("dataset/*.idx")])]
    rows = {relative(run, prefix): DocumentTable(prefix).of_ids(removal.ids) for prefix in prefixes}
    datasets = {name: numbers for name, numbers in rows.items() if numbers}
    return {"datasets": datasets, "contents": {name: content_of(run / name) for name in datasets}}


def _duplicates(run: Path, removal: Removal) -> tuple[list[dict[str, str]], list[str]]:
    """What dedup dropped for a removed document, and the ids that it kept instead of one."""
    displaced, survivors = list[dict[str, str]](), set[str]()
    for document in chain.from_iterable(map(read_any, sorted((run / "dedup/removed").glob("*.jsonl.zst")))):
        if document["id"] in removal.ids and document["survivor"] not in removal.ids:
            survivors.add(document["survivor"])
        elif document["survivor"] in removal.ids and document["id"] not in removal.ids:
            displaced.append({"id": document["id"], "source": source_of(document), "reason": document["reason"]})
    return displaced, sorted(survivors)


def describe(run: Path, plan: Plan) -> Iterator[str]:
    """Describe a plan, one line per fact."""
    yield f"{len(plan['ids'])} documents of {run}: {', '.join(plan['ids'][:_SHOWN])}"
    entries = Counter[str]()
    for name, count in plan["entries"].items():
        entries[name.partition("/")[0]] += count
    yield f"entries: {', '.join(f'{name} {count}' for name, count in entries.items())}"
    for prefix, numbers in plan["datasets"].items():
        yield f"{prefix}: {len(numbers)} tombstones"
    for name, model in plan["models"].items():
        if model["first_read"] is None:
            yield f"{name}: never read them; its checkpoints stay"
            continue
        exact = f"{model['exact']} is the newest before" if model["exact"] else "no checkpoint is older"
        yield f"{name}: first read by iteration {model['first_read']:,}, {model['tokens_read']:,} tokens; {exact}"
        yield f"{name}: withdrawn: {', '.join(model['withdrawn']) or 'none'}"
    for document in plan["displaced"][:_SHOWN]:
        yield f"{document['id']} {document['source']}: dropped as its duplicate ({document['reason']}); it stays out"
    for name in plan["survivors"][:_SHOWN]:
        yield f"{name}: is a duplicate of one of them and is kept; list its id to remove it"
    tables = [(DocumentTable(run / prefix), rows) for prefix, rows in plan["datasets"].items()]
    fetched = {table[row].origin for table, rows in tables for row in rows if "://" in table[row].origin}
    for origin in sorted(fetched)[:_SHOWN]:
        yield f"{origin}: is not edited; delete the file below {run}/fetch, which comes back only for ingest"
    if (run / "tokenizer/vocab.bpe").is_file():
        yield "the tokenizer was trained on them and is kept; rerun train_tokenizer and all later steps to replace it"


def carry_out(run: Path, path: Path, workers: int = 1) -> None:
    """Do what is left of a record, and mark it done. Raises InputError if entries are left."""
    record: Plan = read_takedown(path)
    dedup, removal = load_run(run).dedup, Removal(record["ids"])
    removed = removed_ids([run / REMOVED_IDS]) | removal.ids
    write_text(run / REMOVED_IDS, "".join(f"{name}\n" for name in sorted(removed)))
    for name in record["entries"]:
        remove_from(run / name, removal, run / name)
    for name in record["signatures"]:
        _renew_signatures(run, name, dedup, workers)
    for prefix, numbers in record["datasets"].items():
        write_tombstones(run / prefix, numbers)
    for name, model in record["models"].items():
        withdraw(run, run / name, model)
    for rebuilt in filter(Path.is_file, chain.from_iterable(map(run.glob, _REBUILT))):
        rebuilt.unlink()
    for name, time in record["times"].items():  # otherwise Snakemake reruns the steps that read them
        os.utime(run / name, ns=(time, time))
    if left := _count_entries(run, removal, workers):
        raise InputError(f"{run / next(iter(left))}: still names a document; do it again with --yes")
    write_json(path, {**record, "state": "done", "ended": _now()})


def _renew_signatures(run: Path, name: str, dedup: DedupSettings, workers: int) -> None:
    """Compute an edited shard's signatures; with the old identity, later runs repeat nothing."""
    path = run / f"dedup/work/{name}.signatures"
    with Workers(workers) as pool:
        write_signatures(run / f"clean/{name}.jsonl.zst", path, dedup, pool, identity=identity_of(path))


def _editable_files(run: Path) -> Iterator[Path]:
    for path in sorted(run.rglob("*")):
        parts = path.relative_to(run).parts
        of_model = len(parts) > 2 and parts[0] == "models" and parts[2].startswith(_SKIPPED_OF_MODEL)
        if parts[0] not in _SKIPPED and not of_model and path.is_file() and editor_of(path):
            yield path


def _count_entries(run: Path, removal: Removal, workers: int) -> dict[str, int]:
    """The number of entries by file, for files with any; paths are relative to the run."""
    files = list(_editable_files(run))
    with Workers(min(workers, max(1, len(files)))) as pool:
        counts = list(pool.map(partial(remove_from, removal=removal), files))
    return {relative(run, path): count for path, count in zip(files, counts, strict=True) if count}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("workflow.provenance.remove", __doc__)
    parser.add_argument("--urls", type=cli.input_path, metavar="FILE", help="URLs or ids, one per line")
    parser.add_argument("--run", type=cli.input_path, required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--model", type=cli.input_path, nargs="+", default=[], metavar="M", help="models of other runs")
    parser.add_argument("--yes", action="store_true", help="remove them; without it, only print what would be removed")
    parser.add_argument("--by", metavar="NAME", help="who signs the record off; needed with --yes")
    cli.add_workers(parser)
    arguments = parser.parse_args(argv)
    run: Path = arguments.run
    load_run(run)
    records = sorted((run / FOLDER).glob("*.json"))
    unfinished = [path for path in records if read_takedown(path)["state"] == "started"]
    if unfinished and not arguments.yes:
        raise InputError(f"{unfinished[0]}: is not finished; finish it first: --run {run} --yes")
    if not arguments.urls and not unfinished:
        raise InputError("--urls is missing: name a file with URLs or ids")
    if arguments.urls and arguments.yes and not arguments.by:
        raise InputError("--by is missing: --yes needs the name of who signs the record off")
    with locked_run(run) if arguments.yes else nullcontext():
        for path in unfinished:
            carry_out(run, path, arguments.workers)
            print(f"{path}: finished")
        if not arguments.urls:
            return 0
        plan = make_plan(run, read_ids(arguments.urls), arguments.model, arguments.workers)
        if plan is None:
            print(f"{run}: all of them have been removed")
            return 0
        print("\n".join(describe(run, plan)))
        if not arguments.yes:
            print("nothing was changed; --yes removes them")
            return 0
        path = run / FOLDER / f"{int(records[-1].stem if records else 0) + 1:04d}.json"
        signed = {"state": "started", "begun": _now(), "by": arguments.by, "commit": run_card.commit()}
        write_json(path, {**signed, **plan})
        carry_out(run, path, arguments.workers)
        print(f"removed; the record is {path}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
