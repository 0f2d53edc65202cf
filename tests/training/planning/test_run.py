"""The plan shows what a run will do with which data; wrong data are refused before anything is
computed.
"""

from pathlib import Path

import numpy as np
import pytest

from common.errors import ToolkitError
from common.settings.training import DOCUMENT_RULES
from corpus.index import IndexWriter, Meta
from tests.training.helpers import byte_documents, settings_of, write_config, write_corpus
from training.planning.run import Plan, make_plan


def blended(folder: Path, *data: tuple[str, float], **train: object) -> Plan:
    """The plan of a model that is trained on these of a folder's corpora."""
    listed = [{"prefix": str(folder / name), "weight": weight} for name, weight in data]
    return make_plan(settings_of(write_config(folder, {}, {}, train, data=listed)), "tiny")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of corpora."""
    write_corpus(tmp_path / "books", byte_documents(40))
    write_corpus(tmp_path / "web", byte_documents(200), vocab_size=None)
    write_corpus(tmp_path / "short", [np.array([1, 2, 256], np.uint16)])
    with IndexWriter(tmp_path / "other", np.uint16, Meta(257, 3)) as writer:
        for document in byte_documents(40):
            writer.add_document(np.append(document[:-1], 3))
    for number in range(2):
        with IndexWriter(tmp_path / f"trained{number}", np.uint16, Meta(257, 256, f"hash {number}")) as writer:
            writer.add_documents(np.full(400, 7, np.uint16), np.full(20, 20))
    return tmp_path


def test_a_table_shows_how_the_run_uses_each_corpus(folder: Path) -> None:
    plan = blended(folder, ("books", 0.75), ("web", 0.25), iterations=1000, split="90,5,5")
    rows = [line.split() for line in plan.text().splitlines()]
    train = [row for row in rows if "train" in row[:2]]
    others = [row[:4] for row in rows if row[1:2] != ["train"]]
    lengths = [len(document) for document in byte_documents(200)]
    uses = (("books", "75.0%", 36, 6000), ("web", "25.0%", 180, 2000))
    for row, (name, share, documents, taken) in zip(train, uses, strict=True):
        tokens = sum(lengths[:documents])
        samples = (tokens - 1) // 16
        numbers = [documents, tokens, samples, taken]
        assert row == [str(folder / name), "train", share, *(f"{n:,}" for n in numbers), f"{taken / samples:.2f}"]
    assert others[-4:] == [
        [str(folder / name), part, share, documents]
        for part in ("valid", "test")
        for name, share, documents in (("books", "75.0%", "2"), ("web", "25.0%", "10"))
    ]
    # the test part is the last documents in their own order; validation ends before a corpus is
    # seen twice
    valid, test = plan.data.valid, plan.data.test
    assert test is not None
    assert np.array_equal(test.parts[0].sample(0), np.concatenate(byte_documents(40)[-2:])[:17])
    assert valid.taken(valid.per_epoch, 0) <= valid.parts[0].per_epoch < valid.taken(valid.per_epoch + 2, 0)
    without = blended(folder, ("books", 1), split="90,10,0")
    assert without.data.test is None and "no test part: train.split 90,10,0" in without.text()
    for count in (2, 3):  # with all three the model never learns how a document begins
        rules = blended(folder, ("books", 1), **dict.fromkeys(DOCUMENT_RULES[-count:], True))
        assert ("generate needs a prompt" in rules.text()) == (count == 3)


def test_weights_that_are_rounded_by_a_sample_or_more_are_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("dataset.blend", "planning.run"):
        monkeypatch.setattr(f"training.{module}.MAX_PERIOD", 1024)
    plan = blended(folder, ("books", 0.1234), ("web", 0.8766), iterations=2000)
    away = abs(plan.data.train.taken(16_000, 0) - 16_000 * 0.1234)
    assert away > 1 and f"1/1,024: up to {int(away)} samples more or fewer" in plan.text()
    assert "more or fewer" not in plan.text(done=1990)
    assert "more or fewer" not in blended(folder, ("books", 0.123), ("web", 0.877), iterations=2000).text()


@pytest.mark.parametrize(
    ("data", "train", "names"),
    [
        ([("books", 1), ("short", 1)], {"split": "1,0,0"}, "short: .* 3 tokens in 1 documents"),
        ([("books", 1), ("other", 1)], {}, "books with token 256 and .*other with token 3"),
        ([("trained0", 1), ("books", 1), ("trained1", 1)], {}, "trained0 and .*trained1 have other merges"),
    ],
)
def test_corpora_that_do_not_fit_stop_before_anything_is_computed(
    folder: Path, data: list[tuple[str, float]], train: dict[str, object], names: str
) -> None:
    with pytest.raises(ToolkitError, match=names):
        blended(folder, *data, **train)
