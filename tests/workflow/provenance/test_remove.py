"""Documents leave a run and everything made from it; training continues as if never read."""

import gzip
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import permutations
from pathlib import Path

import numpy as np
import orjson
import pytest
import zstandard

from common.config import load_settings
from common.errors import ConfigError
from common.files import read_json
from corpus.dedup.signatures import identity_of
from corpus.index import IndexedDataset, IndexWriter, Meta
from corpus.index.documents import REMOVED, DocumentTable, write_tombstones
from corpus.scrape.archive import Archive, parse_request, write_records
from corpus.scrape.warc import read_records
from corpus.urls.url import document_id
from tests.corpus.scrape.test_archive import URL, page
from tests.helpers import assert_one_line_error, called, read_rejects, read_shard, write_shard
from tests.training.helpers import byte_documents, tensor_files, train_tiny, write_config
from tests.warc_records import record
from tests.workflow.pipeline import planned
from training.trace import Trace
from workflow.cards.content import without_tombstones
from workflow.checks import check_takedown
from workflow.provenance import remove as module
from workflow.provenance.remove import main
from workflow.provenance.takedown import Removal, redirected, remove_from

RUN = Path("results/x")


@pytest.fixture
def run(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a finished run that may be changed, and the folder of every command."""
    folder = tmp_path / "copy"
    shutil.copytree(finished_run, folder, symlinks=True, ignore=shutil.ignore_patterns("snapshots"))
    monkeypatch.chdir(folder)
    card = read_json(RUN / "run.json")
    (RUN / "run.json").write_bytes(orjson.dumps({**card, "inode": RUN.stat().st_ino}))
    return RUN


def named(folder: Path, *names: str) -> Path:
    """A list of URLs or ids."""
    path = folder.parent / "leaving.txt"
    path.write_text("".join(f"{name}\n" for name in names))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, decompressed."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
        found[str(path.relative_to(folder))] = gzip.decompress(data) if path.suffix == ".gz" else data
    return found


def cluster(run: Path) -> list[dict[str, str]]:
    """A document of the dataset and all pages that hold its text, which dedup dropped."""
    removed = [row for path in (run / "dedup/removed").glob("*.zst") for row in read_rejects(path)]
    kept = [row for path in sorted((run / "dedup").glob("*.zst")) for row in read_shard(path)]
    for survivor in kept:
        found = [survivor, *(row for row in removed if row["survivor"] == survivor["id"])]
        others = [row["text"] for row in (*kept, *removed) if row not in found]
        if len(found) > 2 and not any(survivor["text"][200:300] in text for text in others):
            return found
    raise AssertionError


def test_documents_leave_every_file_and_only_training_and_what_follows_it_run_again(run: Path) -> None:
    documents = cluster(run)
    first = documents[0]
    with (run / "logs/blacklist.log").open("a") as log:
        log.write(f"warning: {first['url']}: odd\n")
    stats = read_json(run / "clean/0001.stats.json")
    stats["examples"] = {"short": [{key: first[key] for key in ("id", "url", "text")}]}
    (run / "clean/0001.stats.json").write_bytes(orjson.dumps(stats))
    before = {name: data for name, data in contents(run).items() if "/trace/" not in name}
    ids = {row["id"].encode() for row in documents}
    names = {row["url"].encode() for row in documents} | {first["text"][200:300].encode()}
    files = named(run, first["url"].replace("http", "HTTP") + "#part", *(row["id"] for row in documents[1:]))
    said = called(main, "--urls", files, "--run", run)
    assert said.returncode == 0 and "nothing was changed" in said.stdout and first["id"] in said.stdout
    of_one = [called(main, "--urls", named(run, row["id"]), "--run", run).stdout for row in documents[:2]]
    assert all(f"\n{row['id']} http" in of_one[0] for row in documents[1:]) and "dropped as its duplicate" in of_one[0]
    assert f"{first['id']}: is a duplicate of one of them and is kept" in of_one[1]
    named(run, first["url"].replace("http", "HTTP") + "#part", *(row["id"] for row in documents[1:]))
    after = contents(run)
    assert {name for name in after if before.get(name) != after[name]} <= {"models/tiny/trace/0-0.order"}
    done = called(main, "--urls", files, "--run", run, "--yes", "--by", "Ada", "--workers", "2")
    assert done.returncode == 0, done.stderr
    after = contents(run)
    assert sum(any(name in data for name in names) for data in before.values()) >= 9
    assert [path for path, data in after.items() if any(name in data for name in names)] == []
    naming = {path for path, data in after.items() if any(name in data for name in ids)}
    assert naming == {"takedown/0001.json", "takedown/ids.txt"}
    record = read_json(run / "takedown/0001.json")
    assert (record["state"], record["by"], set(record["ids"])) == ("done", "Ada", {name.decode() for name in ids})
    for prefix, (number,) in record["datasets"].items():
        dataset = IndexedDataset(run / prefix)
        dataset.verify()
        assert set(dataset.document(number).tolist()) == {50256}
        then, now = (np.frombuffer(found[f"{prefix}.bin"], "<u2") for found in (before, after))
        begin = int(dataset.pointers[number]) // 2
        changed = np.flatnonzero(then != now)
        assert (changed.min(), changed.max()) == (begin, begin + len(dataset.document(number)) - 2)
        assert DocumentTable(run / prefix)[number][1:3] == (REMOVED, "")
        left = (dataset.n_documents - 1, len(dataset.tokens) - len(dataset.document(number)))
        assert without_tombstones(run / prefix) == left
    buried = tuple(f"{prefix}." for prefix in record["datasets"])
    for path in before.keys() & after.keys():
        had = any(name in before[path] for name in names | ids)
        if not had and not path.startswith((*buried, "models/", "records/")):
            assert after[path] == before[path], path
    jobs, _ = planned(Path())
    assert jobs == {"train": 1, "merge": 1, "evaluate": 1, "generate": 1, "report": 1, "all": 1, "total": 6}
    assert_one_line_error(called("workflow.provenance.show", first["id"], "--run", run), "has this id")
    other = read_shard(next((run / "dedup").glob("*.zst")))[-1]["id"]
    assert "decoded, they are the text" in called("workflow.provenance.show", other, "--run", run).stdout


class Interrupted(BaseException):
    """A kill."""


def test_a_takedown_that_is_killed_anywhere_is_finished_by_the_next(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = named(run, cluster(run)[0]["id"])
    whole = Path("whole")
    shutil.copytree(run, whole)

    def takedown(folder: Path, kill_at: int) -> int:
        """Calls of what changes files, before one of which it is killed."""
        calls = 0

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                nonlocal calls
                calls += function is not remove_from or len(arguments) == 3  # otherwise it only reads
                if calls == kill_at:
                    raise Interrupted
                return function(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            writers = ("remove_from", "_renew_signatures", "write_tombstones", "withdraw", "write_text", "write_json")
            for name in writers:
                patch.setattr(module, name, counted(getattr(module, name)))
            patch.setattr(os, "utime", counted(os.utime))
            with suppress(Interrupted):
                main(["--urls", str(files), "--run", str(folder), "--yes", "--by", "Ada"])
        return calls

    def state(folder: Path) -> dict[str, object]:
        found = {
            name: data
            for name, data in contents(folder).items()
            if not name.startswith(("takedown/0", "records/", "models/tiny/trace/"))
        }
        times = {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*.zst")}
        return {**found, "times": times, "record": read_json(folder / "takedown/0001.json")["state"]}

    steps = takedown(whole, -1)
    expected = state(whole)
    assert expected["record"] == "done" and steps > 15
    for kill_at in range(2, steps + 1, 3):
        folder = Path(f"killed-{kill_at}")
        shutil.copytree(run, folder)
        takedown(folder, kill_at)
        assert_one_line_error(called(main, "--urls", files, "--run", folder), "is not finished")
        with pytest.raises(ConfigError, match="not finished"):
            check_takedown(load_settings(folder / "config.yaml").model_copy(update={"run": folder}))
        same = ["--urls", files, "--by", "Ada"] * (kill_at % 2)  # or only what finishes it
        finished = called(main, "--run", folder, "--yes", *same)
        assert (finished.returncode, finished.stderr) == (0, "")
        assert state(folder) == expected


def test_removed_documents_never_come_back(tmp_path: Path) -> None:
    urls = [f"http://example.com/page-{number}" for number in range(4)]
    (tmp_path / "urls.txt").write_text("".join(f"{url}\n" for url in urls))
    (tmp_path / "ids.txt").write_text(f"{document_id(urls[2])}\n")
    removed = ("--removed", tmp_path / "ids.txt", tmp_path / "none.txt", "--rejects", tmp_path / "rejects.jsonl")
    output = tmp_path / "kept.txt"
    assert called("corpus.blacklist", "--input", tmp_path / "urls.txt", "--output", output, *removed).returncode == 0
    assert output.read_text().split() == [urls[0], urls[1], urls[3]]
    lines = (tmp_path / "rejects.jsonl").read_text()
    assert "page-2" not in lines and '"reason":"removed"' in lines
    documents = [{"id": "", "url": url, "text": f"text of {url}"} for url in urls]
    source = write_shard(tmp_path / "source.jsonl", documents)
    output = tmp_path / "ingested.jsonl.zst"
    assert called("corpus.ingest", "--input", source, "--output", output, *removed).returncode == 0
    assert [row["url"] for row in read_shard(output)] == [urls[0], urls[1], urls[3]]
    assert "page-2" not in (tmp_path / "rejects.jsonl").read_text()


def write_run(folder: Path, buried: list[int], base: str = "") -> Path:
    """A run with a dataset of documents with URLs, some of them tombstones; its configuration."""
    config = write_config(folder, {}, {}, {"iterations": 12, "save_interval": 4, "eval_interval": 6})
    if base:
        config.write_text(f"{config.read_text()}base: {base}\n")
    prefix = load_settings(config).dataset_prefix
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexWriter(prefix, np.uint16, Meta(257, 256), table=True) as writer:
        assert writer.table is not None
        for number, tokens in enumerate(byte_documents(100)[60:] if base else byte_documents(60)):
            writer.add_document(tokens)
            url = f"http://h{number % 5}{base}.example/{number}"
            writer.table.add([{"id": document_id(url), "url": url}], "0000")
    write_tombstones(prefix, buried)
    return config


@pytest.mark.slow
def test_removals_from_a_run_and_one_that_extends_it_end_alike_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`base`, `more` and `again` leave the base and name the model, `late` does not; `own` leaves
    the other.
    """
    model = Path("b/models/tiny")

    def trained(folder: Path, leaving: dict[str, list[int]]) -> None:
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        write_run(Path("a"), leaving["a"])
        assert train_tiny(write_run(Path("b"), leaving["b"], "a")) == 0

    trained(tmp_path / "made", {"a": [], "b": []})
    trace = Trace(model)
    reads = [trace.reads(corpus, range(60)) for corpus in range(2)]
    first = [dict(zip(*(column[::-1].tolist() for column in found[:2]), strict=True)) for found in reads]
    leaving = [next(n for n, iteration in first[0].items() if iteration > 8)]
    leaving += [next(n for n in range(60) if n not in first[0]), next(n for n, i in first[1].items() if 4 < i <= 8)]
    x, never, z = (trace.tables[n > 1][number] for n, number in enumerate(leaving))
    write_shard(Path("a/clean/0000.jsonl.zst"), [{"id": row.id, "url": row.url, "text": row.url} for row in (x, never)])
    work = ("--work", "a/dedup/work")
    assert called("corpus.dedup", "signatures", "--input", "a/clean/0000.jsonl.zst", *work).returncode == 0
    signed = identity_of(Path("a/dedup/work/0000.signatures"))
    for path in ("merged/tiny/config.json", "evaluation/tiny.json"):
        Path("b", path).parent.mkdir(parents=True)
        Path("b", path).write_text("{}")
    removals: dict[str, tuple[str, str, list[object]]] = {
        "base": ("a", x.url, ["--model", model]),
        "more": ("a", never.url, ["--model", model]),
        "late": ("a", x.url, []),
        "again": ("a", x.url, ["--model", model]),
        "own": ("b", z.url, []),
    }

    def end(*order: str) -> dict[str, object]:
        """What a copy of both runs has after these removals."""
        folder = tmp_path / "-".join(order)
        shutil.copytree(tmp_path / "made", folder, ignore=shutil.ignore_patterns("trace"))
        monkeypatch.chdir(folder)
        for name in order:
            run, url, more = removals[name]
            files = named(folder / "x", url)
            done = called(main, "--urls", files, "--run", run, *more, "--yes", "--by", "Ada")
            assert done.returncode == 0, (order, name, done.stderr)
            if name == "late":
                refused = called("training.train", "--config", "b/config.yaml", "--model", "tiny")
                cure = f"if workflow.provenance.remove changed it, repeat it with --model {model}"
                assert_one_line_error(refused, cure)
        assert not Path("b/merged/tiny").exists() and not Path("b/evaluation/tiny.json").exists()
        aside = {path.parent for path in model.glob("withdrawn/*/iter_*")}
        assert aside == set(model.glob("withdrawn/*")), "none is empty"
        assert identity_of(Path("a/dedup/work/0000.signatures")) == signed
        assert "http" not in "".join(row["url"] for row in read_shard(Path("a/clean/0000.jsonl.zst")))
        iterations = {path.name: read_json(path / "manifest.json")["content"] for path in model.glob("iter_*")}
        known = {run: sorted(Path(run, "takedown/ids.txt").read_text().split()) for run in "ab"}
        return {"iterations": iterations, "known": known, **contents(Path("a/dataset")), **contents(Path("b/dataset"))}

    found = end("base", "more", "own")
    assert list(found["iterations"]) == ["iter_0000004"]  # type: ignore[call-overload]
    for order in permutations(["base", "more", "own"]):
        assert order == ("base", "more", "own") or end(*order) == found, order
    for late in (["late", "own", "again", "more"], ["own", "late", "more"], ["late", "more", "own"]):
        assert end(*late) == found, late
    assert train_tiny(Path("b/config.yaml")) == 0
    one = tensor_files(model / "iter_0000012")
    for run, url, model_of, said in (
        ("b", trace.tables[0][first[0].popitem()[0]].url, [], "a: b extends it, and it has some of these documents"),
        ("b", z.url, ["--model", "../made/b/models/tiny"], "was not trained on data of b"),
    ):
        assert_one_line_error(called(main, "--urls", named(tmp_path / "x", url), "--run", run, *model_of), said)
    repeated = called(main, "--urls", named(tmp_path / "x", x.url), "--run", "a")
    assert repeated.returncode == 0 and "all of them have been removed" in repeated.stdout
    trained(tmp_path / "fresh", {"a": leaving[:2], "b": leaving[2:]})
    other = tensor_files(model / "iter_0000012")
    assert one == other


def test_training_goes_on_as_if_the_documents_had_never_been_there(tmp_path: Path) -> None:
    """Dropout is on: the weights of both runs are bitwise equal; earlier ones differ."""
    run, model, config = tmp_path / "a", tmp_path / "a/models/tiny", write_run(tmp_path / "a", [])
    assert train_tiny(config) == 0
    trace = Trace(model)
    reads = trace.reads(0, range(60))
    first = dict(zip(reads.documents[::-1].tolist(), reads.iterations[::-1].tolist(), strict=True))
    leaving = [number for number, iteration in first.items() if 4 < iteration <= 12][:3]
    never = next(number for number in range(60) if number not in first)
    original = tensor_files(model / "iter_0000012")

    # one that no iteration has read: the checkpoints stay
    files = named(run, trace.tables[0][never].url)
    (model / "owner.json").write_text("{}")
    assert_one_line_error(called(main, "--urls", files, "--run", run), "a training has this folder")
    (model / "owner.json").unlink()
    done = called(main, "--urls", files, "--run", run, "--yes", "--by", "Ada")
    assert "never read them; its checkpoints stay" in done.stdout
    show = ("workflow.provenance.trace", "--model", model, "--iteration")
    assert not any("removed" in called(*show, iteration).stdout for iteration in range(1, 13))

    files = named(run, *(trace.tables[0][number].url for number in leaving))
    done = called(main, "--urls", files, "--run", run, "--yes", "--by", "Ada")
    assert done.returncode == 0, done.stderr
    first_read = min(first[number] for number in leaving)
    assert f"first read by iteration {first_read}" in done.stdout and "iter_0000004 is the newest before" in done.stdout
    withdrawn = sorted(path.name for path in (model / "withdrawn/0001").iterdir())
    assert withdrawn == ["iter_0000008", "iter_0000012"]
    assert train_tiny(config) == 0
    assert train_tiny(write_run(tmp_path / "b", [*leaving, never])) == 0
    one, other = (tensor_files(tmp_path / name / "models/tiny/iter_0000012") for name in "ab")
    assert one == other
    assert one != original
    again = called(main, "--urls", files, "--run", run)
    assert again.returncode == 0 and again.stdout == f"{run}: all of them have been removed\n"


def test_what_names_no_document_is_one_line(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    leaving, run = tmp_path / "leaving.txt", ("--run", tmp_path)
    for text, said in (("", "names no document"), ("http://a.example/x\nnot a url\n", "leaving.txt:2: neither")):
        leaving.write_text(text)
        assert_one_line_error(called(main, "--urls", leaving, *run), said)
    leaving.write_text("http://h1.example/1\n")
    assert_one_line_error(called(main, *run), "--urls is missing")
    assert_one_line_error(called(main, "--urls", leaving, *run, "--yes"), "--by is missing")
    assert_one_line_error(called(main, "--run", tmp_path / "models"), "no such file")


def test_a_page_that_was_redirected_to_a_named_one_is_that_one(tmp_path: Path) -> None:
    address, other = "http://a.example/new", "http://a.example/old"
    document = {"id": document_id(other), "url": other, "final_url": address, "text": "x"}
    shard = write_shard(tmp_path / "pages/0000.jsonl.zst", [document, {**document, "id": "b" * 16, "final_url": other}])
    gone = Removal([document_id(address)])
    assert list(redirected(shard, gone)) == [document_id(other)]
    assert remove_from(shard, Removal([document_id(other)]), shard) == 1
    assert [row["id"] for row in read_shard(shard)] == ["b" * 16]


def test_pages_have_their_records_in_the_archive_before_and_after(tmp_path: Path) -> None:
    archive, addresses = tmp_path / "pages/0000.warc.gz", [f"{URL}{name}" for name in "abc"] + ["http://old.example/"]
    with Archive(archive) as opened:
        for address in addresses:
            opened.append(page(address[-1], address))
        write_records(archive, opened.responses)
    prefix = tmp_path / "dataset/corpus_text_document"
    prefix.parent.mkdir()
    with IndexWriter(prefix, np.uint16, Meta(257, 256), table=True) as writer:
        assert writer.table is not None
        for address in addresses:
            writer.add_document([1, 2, 256])
            writer.table.add([{"id": document_id(address), "url": address}], "0000")

    def requested() -> list[str]:
        """The URL in each page's record, empty if it has none."""
        table, found = DocumentTable(prefix), []
        for number in range(len(addresses)):
            path, _, start = table[number].origin.rpartition(":")
            with archive.open("rb") as file:
                file.seek(int(start or 0))
                records = read_records(file, archive, parse_request)
                found.append(next(records)[2] if path else "")
        return found

    assert requested() == addresses
    before = archive.read_bytes() + gzip.compress(record(URL, bytes(99_999)) * 2)[:-8] + bytes(8)
    archive.write_bytes(before)
    assert remove_from(archive, Removal([document_id(addresses[1])])) == 1 and archive.read_bytes() == before
    assert remove_from(archive, Removal([document_id(addresses[1])]), archive) == 1
    assert requested() == [addresses[0], "", *addresses[2:]]
    assert remove_from(archive, Removal([document_id(f"{URL}/")]), archive) == 1  # what http://old.example/ led to
    assert requested() == [addresses[0], "", addresses[2], ""]
