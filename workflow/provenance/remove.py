"""Remove documents from a run and everything made from it, and name the checkpoints that never read them.

    python -m workflow.provenance.remove --urls takedown.txt --run results/demo
    python -m workflow.provenance.remove --urls takedown.txt --run results/demo --exports parquet
    python -m workflow.provenance.remove --urls takedown.txt --run results/demo --yes --by "Ada Lovelace"

--urls names URLs or ids of documents, one per line; a page that was redirected to one of them counts as that one.
Without --yes nothing is changed: the command says what it would remove. With it, the documents leave the lists of URLs,
pages, archives, journals, shards, rejects, examples, logs and --exports; report and cards, which `snakemake` makes
again, are deleted. No later sample of a training moves: in datasets, their tokens become a tombstone, end-of-text as
often as they had tokens, which no loss counts. Of the run's models, and of those named with --model, checkpoints
from the first iteration on that read one of them move to MODEL/withdrawn; the newest before it is exact, and training
goes on from there. RUN/takedown/0001.json is the record; a run that is killed is finished by the next one with --yes.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from common import cli, run_card, steps
from common.config import load_settings
from common.errors import InputError
from common.files import (
    MARK,
    REMOVED_IDS,
    Document,
    document_writer,
    locked_run,
    read_json,
    read_lines,
    removed_ids,
    write_json,
    write_text,
)
from common.settings import Settings
from common.workers import Workers
from corpus.dedup.signatures import write_signatures
from corpus.index import content_of
from corpus.index.documents import DocumentTable, write_tombstones
from corpus.urls.url import document_id
from training.model_folder import checkpoint_folders, iteration_of
from training.trace import Trace
from workflow.provenance.sample import read_any
from workflow.provenance.takedown import Gone, editor_of, redirected, remove_from

FOLDER = REMOVED_IDS.parent.name
_MADE_AGAIN = ("report.html", "cards/**/*", "dataset/*.ngrams")
# what has no entries of documents, or is made again; site is the demo's input
_PASSED = ("records", FOLDER, "settings", "merged", "tokenizer", "site", "report.html", "cards")
_PASSED_OF_MODEL = ("iter_", "snapshots", "trace", "withdrawn")
_SHOWN = 20

Record = dict[str, Any]


def read_ids(path: Path) -> list[str]:
    """The ids of the documents that a file names by id or URL. Raises InputError for a line that is neither."""
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        name = line.decode("utf-8", "replace").strip()
        if len(name) == 16 and set(name) <= set("0123456789abcdef"):
            found.append(name)
        elif name:
            try:
                found.append(document_id(name))
            except ValueError as error:
                raise InputError(f"{path}:{number}: neither a URL ({error}) nor the id of a document") from None
    if not found:
        raise InputError(f"{path}: names no document; write one URL or id per line")
    return list(dict.fromkeys(found))


def _files(run: Path, exports: Iterable[Path]) -> Iterator[Path]:
    """Every file with an editor."""
    for folder in (run, *exports):
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; --exports names those of corpus.export")
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            passed = folder == run and (
                parts[0] in _PASSED
                or (len(parts) > 2 and parts[0] == "models" and parts[2].startswith(_PASSED_OF_MODEL))
            )
            if not passed and path.is_file() and editor_of(path):
                yield path


def _entries(run: Path, gone: Gone, exports: Iterable[Path], workers: int) -> dict[str, int]:
    """How many entries of the documents each file has that has some, by its path below the run."""
    files = list(_files(run, exports))
    with Workers(min(workers, max(1, len(files)))) as pool:
        counts = list(pool.map(partial(remove_from, gone=gone), files))
    return {_below(run, path): count for path, count in zip(files, counts, strict=True) if count}


def _below(run: Path, path: Path) -> str:
    return str(path.relative_to(run) if path.is_relative_to(run) else path.absolute())


def make_plan(
    run: Path, wanted: Iterable[str], models: Sequence[Path] = (), exports: Sequence[Path] = (), workers: int = 1
) -> Record:
    """What removing documents would do. Raises InputError if the run knows none of them, or a training is at work."""
    gone = Gone(wanted)
    pages = run / steps.named("scrape").folder
    gone = Gone([*gone.ids, *(name for path in sorted(pages.glob("*.jsonl.zst")) for name in redirected(path, gone))])
    entries = _entries(run, gone, exports, workers)
    datasets: dict[str, list[int]] = {}
    for path in sorted([*run.glob("tokens/*.idx"), *run.glob("dataset/*.idx")]):
        if numbers := DocumentTable(path.with_suffix("")).of_ids(gone.ids):
            datasets[_below(run, path.with_suffix(""))] = numbers
    if not entries and not datasets:
        raise InputError(f"{run}: no step has seen any of these documents")
    signed = [path.stem for path in sorted(run.glob("dedup/work/*.signatures"))]
    signatures = [name for name in signed if f"clean/{name}.jsonl.zst" in entries]
    touched = [*entries, *(f"dedup/work/{name}.signatures" for name in signatures)]
    touched += [prefix + suffix for prefix in datasets for suffix in (".bin", ".json", ".docs")]
    folders = [path.parent for path in sorted(run.glob("models/*/settings.yaml"))]
    trained = (_of_model(run, folder, datasets) for folder in [*folders, *models])
    return {
        "format": 1,
        "ids": sorted(gone.ids),
        "entries": entries,
        "signatures": signatures,
        "datasets": datasets,
        "models": {_below(run, Path(found.pop("folder"))): found for found in trained if found},
        **_duplicates(run, gone),
        "times": {name: (run / name).stat().st_mtime_ns for name in touched},
    }


def _of_model(run: Path, folder: Path, datasets: Mapping[str, Sequence[int]]) -> Record:
    """What a model has read of documents, and which of its checkpoints have; nothing if it has not their datasets."""
    trace, buried = Trace(folder), {(run / prefix).resolve(): numbers for prefix, numbers in datasets.items()}
    own = [(corpus, buried.get(prefix.resolve(), ())) for corpus, prefix in enumerate(trace.prefixes)]
    if not any(numbers for _, numbers in own):
        return {}
    if (folder / "owner.json").is_file():
        raise InputError(f"{folder}/owner.json: a training has this folder; stop it, or remove the file if it is dead")
    reads = [trace.reads(corpus, numbers) for corpus, numbers in own if numbers]
    first = min((int(found.iterations.min()) for found in reads if len(found.iterations)), default=None)
    names = [path.name for path in checkpoint_folders(folder)]
    withdrawn = [name for name in names if first is not None and iteration_of(Path(name)) >= first]
    return {
        "folder": folder,
        "first_read": first,
        "tokens_read": sum(int(found.tokens.sum()) for found in reads),
        "exact": next((name for name in names if name not in withdrawn), None),
        "withdrawn": withdrawn,
        "contents": {_below(run, trace.prefixes[corpus]): content_of(trace.prefixes[corpus]) for corpus, n in own if n},
    }


def _dropped(run: Path) -> Iterator[Document]:
    """What dedup dropped, each with its survivor."""
    return chain.from_iterable(map(read_any, sorted((run / "dedup/removed").glob("*.jsonl.zst"))))


def _duplicates(run: Path, gone: Gone) -> Record:
    """Documents that dedup dropped for one that leaves, and documents whose text one that leaves had, too."""
    displaced, survivors = list[Record](), set[str]()
    for found in _dropped(run):
        if found["id"] in gone.ids and found["survivor"] not in gone.ids:
            survivors.add(found["survivor"])
        elif found["survivor"] in gone.ids and found["id"] not in gone.ids:
            displaced.append({key: found.get(key) for key in ("id", "url", "reason")})
    return {"displaced": displaced, "survivors": sorted(survivors)}


def describe(run: Path, record: Record) -> Iterator[str]:
    """What a record does, for people."""
    yield f"{len(record['ids'])} documents of {run}: {', '.join(record['ids'][:_SHOWN])}"
    steps_of = Counter[str]()
    for name, count in record["entries"].items():
        steps_of[name.partition("/")[0]] += count
    yield f"entries: {', '.join(f'{name} {count}' for name, count in steps_of.items())}"
    for prefix, numbers in record["datasets"].items():
        yield f"{prefix}: {len(numbers)} tombstones"
    for name, found in record["models"].items():
        if found["first_read"] is None:
            yield f"{name}: never read them; its checkpoints stay"
            continue
        exact = f"{found['exact']} is the newest before" if found["exact"] else "no checkpoint is older"
        yield f"{name}: first read by iteration {found['first_read']:,}, {found['tokens_read']:,} tokens; {exact}"
        yield f"{name}: withdrawn: {', '.join(found['withdrawn']) or 'none'}"
    for found in record["displaced"][:_SHOWN]:
        yield f"{found['id']} {found['url'] or ''}: dropped as its duplicate ({found['reason']}); --bring-back keeps it"
    for name in record["survivors"][:_SHOWN]:
        yield f"{name}: has the text of one of them, and stays; name it, too, to remove it"
    if (run / "tokenizer/vocab.bpe").is_file():
        yield "the tokenizer was trained on them: its merges stay; train_tokenizer and all after it would change them"


def carry_out(run: Path, path: Path, workers: int = 1) -> Record:
    """Do what a record says, or what is left of it, and sign it off. Raises InputError if something is left."""
    record, settings = dict(read_json(path)), load_settings(run / "config.yaml")
    gone = Gone(record["ids"])
    known = removed_ids([run / REMOVED_IDS])
    write_text(run / REMOVED_IDS, "".join(f"{name}\n" for name in sorted(known | gone.ids)))
    for name in record["entries"]:
        remove_from(run / name, gone, run / name)
    for name in record["signatures"]:
        _sign(run, name, settings, workers)
    for prefix, numbers in record["datasets"].items():
        write_tombstones(run / prefix, numbers)
    for name, found in record["models"].items():
        _withdraw(run, run / name, found, path.stem)
    for made in filter(Path.is_file, chain.from_iterable(map(run.glob, _MADE_AGAIN))):
        made.unlink()
    for name, time in record["times"].items():  # so that Snakemake does not take them for new
        os.utime(run / name, ns=(time, time))
    outside = {Path(name).parent for name in record["entries"] if Path(name).is_absolute()}
    if left := _entries(run, gone, outside, workers):
        raise InputError(f"{run / next(iter(left))}: still names a document; do it again with --yes")
    record |= {"state": "done", "ended": _now()}
    write_json(path, record)
    return record


def _sign(run: Path, name: str, settings: Settings, workers: int) -> None:
    """Make the signatures of a clean shard again, for runs that grow this one."""
    with Workers(workers) as pool:
        write_signatures(run / f"clean/{name}.jsonl.zst", run / f"dedup/work/{name}.signatures", settings.dedup, pool)


def _withdraw(run: Path, folder: Path, found: Record, number: str) -> None:
    """Set aside what was made from documents that left; tell the other checkpoints of the tombstones."""
    aside = folder / "withdrawn" / number
    if found["withdrawn"]:
        moved = {folder / name: name for name in found["withdrawn"]}
        deleted = [folder / "done.json", folder / "latest", folder / "best"]
        if folder.parent == run / "models":
            moved[steps.result("merge", run, folder.name).parent] = "merged"
            deleted += [steps.result(name, run, folder.name) for name in ("evaluate", "generate")]
        aside.mkdir(parents=True, exist_ok=True)
        for path, name in moved.items():
            if path.exists():
                path.rename(aside / name)
        for path in deleted:
            path.unlink(missing_ok=True)
    contents = {then: content_of(run / prefix) for prefix, then in found["contents"].items()}
    for checkpoint in checkpoint_folders(folder):
        manifest = read_json(checkpoint / "manifest.json")
        manifest["content"] = [contents.get(content, content) for content in manifest["content"]]
        write_json(checkpoint / "manifest.json", manifest)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _bring_back(run: Path, record: Record, output: Path) -> None:
    """Write the displaced documents as dedup got them: a file for the `sources` of a run that grows this one."""
    names = {found["id"] for found in record["displaced"]}
    with document_writer(output) as write:
        for found in _dropped(run):
            if found["id"] in names:
                write({key: value for key, value in found.items() if key not in (MARK, "survivor", "reason")})


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("workflow.provenance.remove", __doc__)
    parser.add_argument("--urls", type=cli.input_path, metavar="FILE", help="URLs or ids, one per line")
    parser.add_argument("--run", type=cli.input_path, required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--model", type=cli.input_path, nargs="+", default=[], metavar="M", help="models of other runs")
    parser.add_argument("--exports", type=cli.input_path, nargs="+", default=[], metavar="DIR", help="of corpus.export")
    parser.add_argument("--bring-back", type=cli.output_file, metavar="FILE", help="write displaced duplicates here")
    parser.add_argument("--yes", action="store_true", help="remove them; without it, only say what would be removed")
    parser.add_argument("--by", metavar="NAME", help="who signs the record off; needed with --yes")
    cli.add_workers(parser)
    arguments = parser.parse_args(argv)
    run: Path = arguments.run
    if not (run / "config.yaml").is_file():
        raise InputError(f"{run / 'config.yaml'}: no such file; --run names the folder of a run that snakemake made")
    records = sorted((run / FOLDER).glob("*.json"))
    unfinished = [path for path in records if read_json(path)["state"] == "started"]
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
        plan = make_plan(run, read_ids(arguments.urls), arguments.model, arguments.exports, arguments.workers)
        print("\n".join(describe(run, plan)))
        if arguments.bring_back:
            _bring_back(run, plan, arguments.bring_back)
        if not arguments.yes:
            print("nothing was changed; --yes removes them")
            return 0
        path = run / FOLDER / f"{len(records) + 1:04d}.json"
        card = {"state": "started", "begun": _now(), "by": arguments.by}
        write_json(path, {**card, "commit": run_card.commit(), **plan})
        carry_out(run, path, arguments.workers)
        print(f"removed; the record is {path}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
