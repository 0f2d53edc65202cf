"""Remove documents from a run and everything made from it, and name the checkpoints that never read them.

    python -m workflow.provenance.remove --urls takedown.txt --run results/demo
    python -m workflow.provenance.remove --urls takedown.txt --run results/demo --yes --by "Ada Lovelace"

--urls names URLs or ids of documents, one per line; a page that was redirected to one of them counts as that one.
Without --yes nothing is changed: the command says what it would remove. With it, the documents leave the lists of URLs,
pages, archives, journals, shards, rejects, examples and logs; report and cards, which `snakemake` makes again, are
deleted. No later sample of a training moves: in datasets, their tokens become a tombstone, end-of-text as often as they
had tokens, which no loss counts, and duplicates that they displaced stay out, also in runs that grow this one. Of the
run's models, and of those named with --model, checkpoints from the first iteration on that read one of them move to
MODEL/withdrawn; the newest before it is exact, and training goes on from there. A model of another run that was not
named is refused by its training; the same command with --model cures that. RUN/takedown/0001.json is the record; a run
that is killed is finished by the next one with --yes.
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
from typing import Any

from common import cli, run_card, steps
from common.config import load_settings
from common.errors import InputError
from common.files import REMOVED_IDS, locked_run, read_json, read_lines, removed_ids, write_json, write_text
from common.settings import Settings
from common.workers import Workers
from corpus.dedup.signatures import identity_of, write_signatures
from corpus.index import content_of
from corpus.index.documents import DocumentTable, write_tombstones
from corpus.urls.url import document_id
from training.model_folder import checkpoint_folders, iteration_of
from training.trace import Trace
from workflow.provenance.sample import read_any, source_of
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


def _files(run: Path) -> Iterator[Path]:
    """Every file with an editor."""
    for path in sorted(run.rglob("*")):
        parts = path.relative_to(run).parts
        of_model = len(parts) > 2 and parts[0] == "models" and parts[2].startswith(_PASSED_OF_MODEL)
        if parts[0] not in _PASSED and not of_model and path.is_file() and editor_of(path):
            yield path


def _entries(run: Path, gone: Gone, workers: int) -> dict[str, int]:
    """How many entries of the documents each file has that has some, by its path below the run."""
    files = list(_files(run))
    with Workers(min(workers, max(1, len(files)))) as pool:
        counts = list(pool.map(partial(remove_from, gone=gone), files))
    return {_below(run, path): count for path, count in zip(files, counts, strict=True) if count}


def _below(run: Path, path: Path) -> str:
    return str(path.relative_to(run) if path.is_relative_to(run) else path.absolute())


def make_plan(run: Path, wanted: Iterable[str], models: Sequence[Path] = (), workers: int = 1) -> Record:
    """What removing documents would do. Raises InputError if that cannot be done, or would leave a model with them."""
    gone = Gone(wanted)
    for base in load_settings(run / "config.yaml").base:
        if any(DocumentTable(path.with_suffix("")).of_ids(gone.ids) for path in base.glob("dataset/*.idx")):
            cure = f"remove them there first: --run {base} --model {run}/models/NAME"
            raise InputError(f"{base}: {run} grows it, and it holds some of these documents; {cure}")
    for folder in models:
        if run.resolve() not in [prefix.parent.parent.resolve() for prefix in Trace(folder).prefixes]:
            raise InputError(f"--model {folder}: was not trained on data of {run}; name models that were")
    pages = run / steps.named("scrape").folder
    gone = Gone([*gone.ids, *(name for path in sorted(pages.glob("*.jsonl.zst")) for name in redirected(path, gone))])
    entries = _entries(run, gone, workers)
    datasets: dict[str, list[int]] = {}
    for path in sorted([*run.glob("tokens/*.idx"), *run.glob("dataset/*.idx")]):
        if numbers := DocumentTable(path.with_suffix("")).of_ids(gone.ids):
            datasets[_below(run, path.with_suffix(""))] = numbers
    plan = {"datasets": datasets, "contents": {prefix: content_of(run / prefix) for prefix in datasets}}
    records = [*map(read_json, sorted((run / FOLDER).glob("*.json"))), plan]
    folders = [path.parent for path in sorted(run.glob("models/*/settings.yaml"))]
    trained = {_below(run, folder): _of_model(run, folder, records) for folder in [*folders, *models]}
    if not (entries or datasets or any(trained.values())):
        raise InputError(f"{run}: no step has seen any of these documents")
    signed = [path.stem for path in sorted(run.glob("dedup/work/*.signatures"))]
    signatures = [name for name in signed if f"clean/{name}.jsonl.zst" in entries]
    touched = [*entries, *(f"dedup/work/{name}.signatures" for name in signatures)]
    touched += [prefix + suffix for prefix in datasets for suffix in (".bin", ".json", ".docs")]
    return {
        "format": 2,
        "ids": sorted(gone.ids),
        "entries": entries,
        "signatures": signatures,
        **plan,
        "models": {name: found for name, found in trained.items() if found},
        **_duplicates(run, gone),
        "times": {name: (run / name).stat().st_mtime_ns for name in touched},
    }


def _of_model(run: Path, folder: Path, records: Sequence[Record]) -> Record:
    """What a model has read of documents, and which of its checkpoints have; nothing if it has not their datasets.

    Documents are those of all records since the newest checkpoint: the model need not have been named each time.
    """
    trace, checkpoints = Trace(folder), checkpoint_folders(folder)
    ours = {(run / name).resolve(): name for record in records for name in record["datasets"]}
    trained_on = dict(enumerate(read_json(checkpoints[0] / "manifest.json")["content"] if checkpoints else ()))
    contents, left = dict[str, list[str]](), dict[int, list[int]]()
    for corpus, prefix in enumerate(trace.prefixes):
        if (name := ours.get(prefix.resolve())) is None:
            continue
        own = [record for record in records if name in record["datasets"]]
        before = [record.get("contents", {}).get(name) for record in own] + [content_of(prefix)]
        then = trained_on.get(corpus, before[-1])
        first = before.index(then) if then in before else 0
        if first < len(own):
            contents[name] = before[first:-1]
            left[corpus] = [number for record in own[first:] for number in record["datasets"][name]]
    if not left:
        return {}
    if (folder / "owner.json").is_file():
        raise InputError(f"{folder}/owner.json: a training has this folder; stop it, or remove the file if it is dead")
    reads = [trace.reads(corpus, numbers) for corpus, numbers in left.items()]
    first_read = min((int(found.iterations.min()) for found in reads if len(found.iterations)), default=None)
    names = [path.name for path in checkpoints]
    withdrawn = [name for name in names if first_read is not None and iteration_of(Path(name)) >= first_read]
    aside = 1 + max((int(path.name) for path in folder.glob("withdrawn/[0-9]*")), default=0)
    return {
        "first_read": first_read,
        "tokens_read": sum(int(found.tokens.sum()) for found in reads),
        "exact": next((name for name in names if name not in withdrawn), None),
        "withdrawn": withdrawn,
        "aside": f"withdrawn/{aside:04d}",
        "contents": contents,
    }


def _duplicates(run: Path, gone: Gone) -> Record:
    """Documents that dedup dropped for one that leaves, and documents whose text one that leaves had, too."""
    displaced, survivors = list[Record](), set[str]()
    for found in chain.from_iterable(map(read_any, sorted((run / "dedup/removed").glob("*.jsonl.zst")))):
        if found["id"] in gone.ids and found["survivor"] not in gone.ids:
            survivors.add(found["survivor"])
        elif found["survivor"] in gone.ids and found["id"] not in gone.ids:
            displaced.append({"id": found["id"], "source": source_of(found), "reason": found["reason"]})
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
        yield f"{found['id']} {found['source']}: dropped as its duplicate ({found['reason']}); it stays out"
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
        _withdraw(run, run / name, found)
    for made in filter(Path.is_file, chain.from_iterable(map(run.glob, _MADE_AGAIN))):
        made.unlink()
    for name, time in record["times"].items():  # so that Snakemake does not take them for new
        os.utime(run / name, ns=(time, time))
    if left := _entries(run, gone, workers):
        raise InputError(f"{run / next(iter(left))}: still names a document; do it again with --yes")
    record |= {"state": "done", "ended": _now()}
    write_json(path, record)
    return record


def _sign(run: Path, name: str, settings: Settings, workers: int) -> None:
    """Make the signatures of a clean shard again, for later runs; those that grow this one need not run again."""
    path = run / f"dedup/work/{name}.signatures"
    with Workers(workers) as pool:
        write_signatures(run / f"clean/{name}.jsonl.zst", path, settings.dedup, pool, identity=identity_of(path))


def _withdraw(run: Path, folder: Path, found: Record) -> None:
    """Set aside what was made from documents that left; tell the other checkpoints of the tombstones."""
    aside, owner = folder / found["aside"], folder.parent.parent
    if found["withdrawn"]:
        moved = {folder / name: name for name in found["withdrawn"]}
        deleted = [folder / "done.json", folder / "latest", folder / "best"]
        if folder.parent.name == "models":
            moved[steps.result("merge", owner, folder.name).parent] = "merged"
            deleted += [steps.result(name, owner, folder.name) for name in ("evaluate", "generate")]
        aside.mkdir(parents=True, exist_ok=True)
        for path, name in moved.items():
            if path.exists():
                path.rename(aside / name)
        for path in deleted:
            path.unlink(missing_ok=True)
    contents = {then: content_of(run / prefix) for prefix, befores in found["contents"].items() for then in befores}
    for checkpoint in checkpoint_folders(folder):
        manifest = read_json(checkpoint / "manifest.json")
        manifest["content"] = [contents.get(content, content) for content in manifest["content"]]
        write_json(checkpoint / "manifest.json", manifest)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("workflow.provenance.remove", __doc__)
    parser.add_argument("--urls", type=cli.input_path, metavar="FILE", help="URLs or ids, one per line")
    parser.add_argument("--run", type=cli.input_path, required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--model", type=cli.input_path, nargs="+", default=[], metavar="M", help="models of other runs")
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
        plan = make_plan(run, read_ids(arguments.urls), arguments.model, arguments.workers)
        print("\n".join(describe(run, plan)))
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
