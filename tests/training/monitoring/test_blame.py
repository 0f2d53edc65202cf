"""A step with a spike or non-finite numbers names its documents; training goes on unchanged."""

import json
import lzma
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common.config import load_settings
from corpus.index import IndexWriter, Meta
from tests.training import helpers
from training.dataset.batches import BatchForm, read_batch
from training.dataset.blend import open_splits
from training.launch.process_group import World
from training.monitoring import blame
from training.monitoring.outputs import target_losses
from training.parallel.dtensor import local_shard
from training.step import compute_gradients, update_weights

ITERATIONS, PLANTED, BATCH = 300, 20, 2


def blamed(run: Path) -> dict[int, dict[str, Any]]:
    """The files of a run, by iteration."""
    files = sorted((run / "models/tiny/blame").iterdir())
    return {int(path.stem.removeprefix("iter_")): json.loads(path.read_text()) for path in files}


def write_dataset(prefix: Path, documents: list[np.ndarray]) -> None:
    with IndexWriter(prefix, np.uint16, Meta(helpers.BYTE_VOCABULARY, 256), table=True) as index:
        assert index.table is not None
        for number, document in enumerate(documents):
            index.add_document(document)
            index.table.add([{"id": f"{number:016x}", "url": f"http://site.example/{number}"}], "0000")


def poison(kind: int, length: int) -> np.ndarray:
    """A repeated token, random bytes, or Russian in a corpus of English."""
    russian = ("Съешь же ещё этих мягких французских булок, да выпей чаю. " * 2).encode()[:length]
    text = np.full(length, 7), np.random.RandomState(kind).randint(128, 256, length), np.frombuffer(russian, np.uint8)
    return np.append(text[kind % 3], 256).astype(np.uint16)


def test_all_of_twenty_planted_documents_are_named(tmp_path: Path) -> None:
    """Named: the document is the first of a spike's `worst`: it adds most to the worst sample."""
    text = np.frombuffer(lzma.decompress((Path(__file__).parents[1] / "english.txt.xz").read_bytes()), np.uint8)
    cuts = np.cumsum(np.random.RandomState(0).randint(60, 90, 900))
    documents = [np.append(part, 256).astype(np.uint16) for part in np.split(text[: cuts[-1]], cuts[:-1])]
    train = {"iterations": ITERATIONS, "micro_batch_size": BATCH, "global_batch_size": BATCH, "warmup": 0.01}
    watch = {"spike": 0.7, "spike_reaction": "skip"}
    config = helpers.write_config(
        tmp_path, {"n_layer": 1, "seq_len": 32, "dropout": 0}, {}, {**train, "log_interval": 100}, watch=watch
    )
    settings = load_settings(config)
    experiment, prefix = settings.experiment("tiny"), settings.dataset_prefix
    write_dataset(prefix, documents)
    data = open_splits(settings.datasets("tiny"), experiment.train, experiment.model, "tiny").train
    reads = defaultdict[int, Counter[int]](Counter)  # the tokens of a document that each iteration reads, from 0
    for number in range(BATCH * ITERATIONS):
        for span in data.parts[0].spans(number):
            reads[span.document][number // BATCH] += span.tokens
    # spikes are known from 100 on; a third of a batch is a spike for any rounding; no batch has two
    planted, taken = list[int](), set[int]()
    for document, tokens in sorted(reads.items()):
        if min(tokens) > 110 and tokens[min(tokens)] >= 22 and not taken & tokens.keys() and len(planted) < PLANTED:
            planted.append(document)
            taken |= tokens.keys()
    assert len(planted) == PLANTED
    for kind, document in enumerate(planted):
        documents[document] = poison(kind, len(documents[document]) - 1)
    write_dataset(prefix, documents)
    assert helpers.train_tiny(config) == 0
    files = blamed(tmp_path)
    named = {record["worst"][0] for record in files.values()}
    assert {f"http://site.example/{document}" for document in planted} <= named
    for iteration, record in files.items():
        assert record["iteration"] == iteration and "nats above the mean of the 100" in record["problem"]
        top, other = record["samples"]
        assert top["loss"] > other["loss"]
        assert record["loss"] == pytest.approx((top["loss"] + other["loss"]) / 2, rel=1e-4)
        place = BATCH * (iteration - 1) + top["sample"]
        spans = {(span.document, span.first, span.tokens) for span in data.parts[0].spans(place)}
        assert {(piece["document"], piece["first"], piece["tokens"]) for piece in top["pieces"]} == spans


def trained(session: helpers.Session, losses: dict[int, float] | None) -> list[torch.Tensor]:
    """The weights after three steps; the mean losses of this process's samples go to `losses`."""
    size, batches = session.plan.experiment.train.global_batch_size, helpers.step_batches(session, 0)
    for step, batch in zip(range(3), batches, strict=False):
        gradients = compute_gradients(session, step + 1, batch)
        for number, nats, counted in target_losses(session, batch, step * size) if losses is not None else ():
            losses[number] = float(nats.sum() / counted.sum())
        update_weights(session, gradients, 0.01)
    return [local_shard(value).detach().clone() for value in session.parameters.values()]


def looked_at(world: World, config: Path) -> tuple[dict[int, float], bool]:
    """The losses by sample of a training that looks at each step, and whether it ends unchanged."""
    plan, losses = helpers.plan_of(config), dict[int, float]()
    seeing, blind = (trained(helpers.open_session(plan, world), seen) for seen in (losses, None))
    return losses, all(map(torch.equal, seeing, blind))


LAYOUTS = [
    {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2, "data": 2, "zero_stage": 3},
    {},
    *(
        pytest.param(layout, marks=pytest.mark.slow)
        for layout in (
            {"tensor": 2, "sequence_parallel": True, "data": 2, "zero_stage": 2},
            {"data": 2, "zero_stage": 0},
            {"pipeline": 2, "tensor": 2, "schedule": "1f1b"},
        )
    ),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda parallel: "-".join(map(str, parallel.values())) or "alone")
def test_losses_are_those_of_the_whole_model_and_looking_changes_no_bit(
    parallel: Mapping[str, Any], tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"model": {"n_layer": 4, "dropout": 0.1}}
    sections["train"] = {"loss": "chunked", "eod_mask_loss": True, "recompute": "selective"}
    config = helpers.make_run(tmp_path / "layout", parallel=parallel, **sections)
    processes = math.prod(parallel.get(axis, 1) for axis in ("tensor", "pipeline", "data"))
    ranks = helpers.on_ranks(processes, looked_at, config)
    assert all(equal for _, equal in ranks)
    found = [loss for losses, _ in ranks for loss in losses.items()]
    assert sorted(number for number, _ in found) == list(range(3 * 8))  # each on one process
    session = helpers.make_session(tmp_path / "whole", **sections)
    (stage,), data = session.stages, session.plan.data.train
    model = stage.eval().model
    batch = read_batch(data, BatchForm(data.end_of_text, eod_mask_loss=True), range(8))
    with torch.no_grad():
        hidden = model.ln_f(model.blocks(model.embed(batch.tokens)))
        logits = F.linear(hidden, model.wte.weight[: helpers.BYTE_VOCABULARY])
    for number, loss in found:
        if number < 8:  # the first step: the weights are the initial ones
            expected = F.cross_entropy(logits[number], batch.targets[number])
            assert loss == pytest.approx(float(expected), rel=1e-5)


def test_a_run_that_warns_writes_few_files(tmp_path: Path, capsys: helpers.Capsys) -> None:
    """Its dataset has no PREFIX.docs: documents are named by their numbers."""
    train = {"iterations": 180, "global_batch_size": 2, "log_interval": 50}
    config = helpers.make_run(tmp_path, model={"n_layer": 1, "dropout": 0.1}, train=train)
    assert helpers.train_tiny(config, "watch.spike=0.001") == 0  # by chance half of the steps
    files, prefix = blamed(tmp_path), load_settings(config).dataset_prefix
    assert len(files) == 20
    (iteration, record), *_ = files.items()
    piece = record["samples"][0]["pieces"][0]
    assert (piece["id"], piece["url"], record["worst"][0]) == ("", "", f"document {piece['document']} of {prefix}")
    named = f"warning: iteration {iteration}: the worst sample has {', '.join(record['worst'][:3])}; see "
    assert named in capsys.readouterr().err


def test_a_sample_that_is_not_finite_is_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = helpers.make_session(tmp_path)
    data, prefix = session.plan.data.train, session.plan.data.train.parts[0].corpus.prefix
    inputs = [set(data.sample(number)[:-1].tolist()) for number in range(16, 24)]
    every = list(chain(*inputs))
    rare, worst = next((token, at) for at, own in enumerate(inputs) for token in own if every.count(token) == 1)
    with torch.no_grad():
        session.stages[0].model.wte.weight[rare] = 1e30  # overflows in LayerNorm
    write_dataset(prefix, helpers.byte_documents(60))
    rows = blame.sample_rows(data, 16, target_losses(session, next(helpers.step_batches(session, 16)), 16))
    for name in ("http://site.example/{}", f"document {{}} of {prefix}"):  # again: replaces the file
        blame.write(tmp_path, 5, float("nan"), "loss nan", deepcopy(rows))
        record = json.loads((tmp_path / "blame/iter_0000005.json").read_text())
        bad, *others = record["samples"]
        losses = [sample["loss"] for sample in others]
        assert (bad["sample"], bad["loss"], len(losses)) == (worst, None, 7)
        assert None not in losses and losses == sorted(losses, reverse=True)
        assert record["worst"] == list(dict.fromkeys(name.format(piece["document"]) for piece in bad["pieces"]))
        monkeypatch.setitem(sys.modules, "corpus.index.documents", None)  # as without tldextract
