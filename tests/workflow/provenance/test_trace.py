"""Tracing gives what a replay of the loader reads, token by token."""

import shutil
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from common.config import load_settings, settings_text
from common.errors import InputError
from common.files import cache_path, write_json, write_text
from corpus.index import IndexWriter, Meta
from corpus.urls.url import document_id
from tests.helpers import read_shard
from tests.training.helpers import Capsys, write_config
from training.dataset.batches import micro_batches
from training.dataset.blend import open_splits
from training.dataset.corpus import Span
from training.trace import Trace
from workflow.provenance.trace import main

SEQ_LEN, WIDTH = 16, 100  # token = 100 x document + its index: every token says where it stands
CHANGE, TRAINED = 5, 23  # iterations: 4 samples each, then 6
CONSUMED = [min(n, CHANGE) * 4 + max(0, n - CHANGE) * 6 for n in range(TRAINED + 1)]


def url(corpus: int, number: int) -> str:
    return f"http://h{number % 3}.c{corpus}.example/{number}"


def write_dataset(prefix: Path, corpus: int, documents: int) -> None:
    rng = np.random.default_rng(corpus)
    prefix.parent.mkdir(parents=True)
    with IndexWriter(prefix, "<u2", Meta(vocab_size=60_000, end_of_text=59_999), table=True) as index:
        assert index.table is not None
        for number in range(documents):
            length = int(rng.integers(0, WIDTH)) if number % 7 else 0  # some are empty
            tokens = np.arange(length, dtype="<u2") + (corpus * 300 + number) * WIDTH
            index.add_documents(tokens, np.array([length]))
            address = url(corpus, number)
            index.table.add([{"id": document_id(address), "url": address}], f"{number % 2:04d}")


@pytest.fixture(params=[[1.0], [0.3, 0.7]], ids=["one dataset", "a blend"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model folder after 23 iterations and a resume with another batch size; in a later epoch."""
    data = []
    for corpus, weight in enumerate(request.param):
        write_dataset(tmp_path / f"run{corpus}/dataset/corpus", corpus, 22 + corpus)
        data.append({"prefix": str(tmp_path / f"run{corpus}/dataset/corpus"), "weight": weight})
    train = {"iterations": 100, "global_batch_size": 6, "micro_batch_size": 1, "split": "8,2,0"}
    sizes = {"vocab_size": 60_000, "seq_len": SEQ_LEN}
    settings = load_settings(write_config(tmp_path, sizes, {}, train, data=data))
    folder = tmp_path / "models/tiny"
    folder.mkdir(parents=True)
    write_text(folder / "settings.yaml", settings_text(settings))
    write_text(folder / "starts.csv", f"iteration,time,processes,consumed_samples\n0,1,1,0\n{CHANGE},2,1,20\n")
    write_text(folder / "train.csv", f"iteration,consumed_samples\n{TRAINED},{CONSUMED[TRAINED]}\n")
    experiment = settings.experiment("tiny")
    blend = open_splits(settings.datasets("tiny"), experiment.train, experiment.model, "tiny").train
    for iteration in (5, 10):
        manifest = {"data": blend.identity, "content": blend.content}
        write_json(folder / f"iter_{iteration:07d}/manifest.json", manifest)
    return folder


def replay(folder: Path, micro: int, data_size: int) -> Iterator[list[np.ndarray]]:
    """The tokens of each iteration's samples, as the data-parallel ranks read them."""
    settings = load_settings(folder / "settings.yaml")
    experiment = settings.experiment("tiny")
    blend = open_splits(settings.datasets("tiny"), experiment.train, experiment.model, "tiny").train
    for begin, end in pairwise(CONSUMED):
        count = (end - begin) // (micro * data_size)
        ranks = [islice(micro_batches(begin, micro, rank, data_size), count) for rank in range(data_size)]
        yield [
            blend.sample(number) for number in sorted(number for rank in ranks for batch in rank for number in batch)
        ]


@pytest.mark.parametrize(("micro", "data_size"), [(1, 1), (1, 2), (2, 1)])
def test_steps_and_documents_are_those_of_a_replay_of_the_loader(model: Path, micro: int, data_size: int) -> None:
    trace, read = Trace(model), defaultdict[int, list[tuple[int, int]]](list)
    epochs = set[tuple[int, int]]()
    for iteration, samples in enumerate(replay(model, micro, data_size), start=1):
        pieces = list(trace.step(iteration))
        corpora = [trace.prefixes.index(piece.dataset) for piece in pieces]
        found = [
            (piece.sample, (corpus * 300 + piece.document.number) * WIDTH + piece.span.first + index)
            for corpus, piece in zip(corpora, pieces, strict=True)
            for index in range(piece.span.tokens)
        ]
        assert found == [(row, token) for row, sample in enumerate(samples) for token in sample.tolist()]
        for sample in samples:
            for document, tokens in zip(*np.unique(sample // WIDTH, return_counts=True), strict=True):
                read[int(document)].append((iteration, int(tokens)))
        epochs |= set(trace._orders)
    assert {epoch for _, epoch in epochs} >= {0, 1}
    for corpus, table in enumerate(trace.tables):
        for number in range(len(table)):
            reads = trace.reads(corpus, table.of_url(url(corpus, number)))
            found = list(zip(reads.iterations.tolist(), reads.tokens.tolist(), strict=True))
            assert sorted(found) == sorted(read[corpus * 300 + number])
    assert sum(map(len, read.values())) == sum(
        len(trace.reads(c, range(len(t))).tokens) for c, t in enumerate(trace.tables)
    )


def test_the_first_read_of_a_span_is_that_of_a_replay_of_the_loader(model: Path) -> None:
    trace, samples = Trace(model), list(enumerate(replay(model, 1, 1), start=1))
    kinds = set[str]()
    for corpus, number, first, size in product(range(len(trace.prefixes)), range(22), (0, 9), (1, 8, 15)):
        if first + size > trace.samples[corpus].corpus.lengths[number]:
            continue
        span, tokens = Span(number, first, size), np.arange(size) + (corpus * 300 + number) * WIDTH + first
        for last in (4, TRAINED):
            held = [(n, int(np.isin(tokens, sample).sum())) for n, rows in samples[:last] for sample in rows]
            some = [*(read for read in held if read[1]), (0, 0)]
            expected = next((read for read in some if read[1] == size), some[0])
            assert trace.first_read(corpus, span, last) == expected
            kinds.add("whole" if expected[1] == size else "part" if expected[1] else "none")
    assert kinds == {"none", "whole", "part"}


def lines(capsys: Capsys, folder: Path, *arguments: object) -> list[str]:
    assert main(["--model", str(folder), *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_command_answers_for_urls_domains_ids_and_iterations(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    found = orjson.loads(lines(capsys, model, "--url", "HTTP://H1.c0.example:80/1#x", "--json")[0])
    assert (found["url"], found["id"]) == (url(0, 1), document_id(url(0, 1))) and found["iterations"]
    before = [n for n in (5, 10) if n < found["iterations"][0]]
    assert found["checkpoint_before"] == (str(model / f"iter_{before[-1]:07d}") if before else "")
    step: list[dict[str, Any]] = [
        orjson.loads(line) for line in lines(capsys, model, "--iteration", found["iterations"][0], "--json")
    ]
    assert found["id"] in {piece["id"] for piece in step}
    whole = lines(capsys, model, "--domain", "c0.example")
    assert whole[-2].startswith(f"22 of {tmp_path}/run0/dataset/corpus: ") and "newest checkpoint before" in whole[-1]
    assert "… and 2 more documents (--json lists all)" in whole
    write_text(tmp_path / "ids", f"{found['id']}\n")
    assert orjson.loads(lines(capsys, model, "--ids", tmp_path / "ids", "--json")[0]) == found
    only = lines(capsys, model, "--iteration", 3, "--sample", 2)
    assert all(line.startswith("sample 2 ") for line in only)
    for wrong, message in [
        (["--iteration", "24"], "has iterations 1 to 23"),
        (["--iteration", "1", "--sample", "4"], "iteration 1 has no such sample"),
        (["--url", "http://c0.example/none"], "http://c0.example/none: no document of"),
    ]:
        with pytest.raises(InputError, match=message):
            main(["--model", str(model), *wrong])


def test_data_that_were_made_again_are_refused_and_moved_data_are_named(model: Path, tmp_path: Path) -> None:
    expected = list(Trace(model).step(9))
    for corpus in range(len(Trace(model).prefixes)):
        (tmp_path / f"run{corpus}").rename(tmp_path / f"moved{corpus}")
    with pytest.raises(InputError, match=r"put it back \(workflow.provenance.trace takes --data"):
        Trace(model).reads(0, [1])
    moved = [tmp_path / f"moved{corpus}/dataset/corpus" for corpus in range(len(Trace(model).prefixes))]
    found = list(Trace(model, moved).step(9))
    assert [(piece.document, piece.span) for piece in found] == [(piece.document, piece.span) for piece in expected]
    write_dataset(tmp_path / "run0/dataset/corpus", 0, 21)
    with pytest.raises(InputError, match="was trained on other data than"):
        Trace(model, [tmp_path / "run0/dataset/corpus", *moved[1:]]).reads(0, [1])


def test_readers_that_ask_at_once_refuse_nobody(model: Path) -> None:
    expected = [piece.span for piece in Trace(model).step(9)]
    (order,) = {path.name for path in (model / "trace").iterdir()} - {"1-0.order", "1-1.order", "0-1.order"}
    shutil.rmtree(model / "trace")
    with cache_path(model / "trace" / order) as half:  # another one is writing it
        half.write_bytes(b"URLORDER")
        assert [piece.span for piece in Trace(model).step(9)] == expected
        (model / "trace" / order).unlink()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: [piece.span for piece in Trace(model).step(9)], range(8)))
    assert found == [expected] * 8
    assert [piece.span for piece in Trace(model).step(9)] == expected, "half an order is made again"


def test_a_run_that_the_dag_made_is_traced_to_its_pages_and_their_text(
    finished_run: Path, tmp_path: Path, capsys: Capsys
) -> None:
    folder = Path(shutil.copytree(finished_run / "results/x", tmp_path / "x")) / "models/tiny"  # tracing keeps a cache
    found = lines(capsys, folder, "--iteration", 1, "--sample", 0, "--text", "--json")
    texts = {
        document["id"]: document["text"]
        for shard in (finished_run / "results/x/dedup").glob("*.jsonl.zst")
        for document in read_shard(shard)
    }
    for piece in map(orjson.loads, found):
        assert piece["text"].removesuffix("<|endoftext|>") in texts[piece["id"]] and piece["text"]
        whole = lines(capsys, folder, "--url", piece["url"], "--json")
        assert orjson.loads(whole[0])["iterations"][0] == 1
