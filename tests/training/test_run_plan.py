"""The plan shows what a run will do with which data; wrong data are refused before anything is computed."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from common.errors import ToolkitError
from corpus.index import IndexWriter, Meta
from tests.training.helpers import byte_documents, make_run, settings_of, write_corpus
from training.run_plan import Plan, make_plan


def blended(folder: Path, *data: tuple[Path, float], **train: object) -> Plan:
    """The plan of a model that is trained on these corpora."""
    config = make_run(folder, train=train)
    raw = yaml.safe_load(config.read_text())
    raw["models"]["tiny"]["data"] = [{"prefix": str(prefix), "weight": weight} for prefix, weight in data]
    config.write_text(yaml.safe_dump(raw))
    return make_plan(settings_of(config), "tiny")


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[Path, Path]:
    write_corpus(tmp_path / "books", byte_documents(40))
    write_corpus(tmp_path / "web", byte_documents(200), vocab_size=None)
    return tmp_path / "books", tmp_path / "web"


def test_a_table_shows_how_the_run_uses_each_corpus(tmp_path: Path, corpora: tuple[Path, Path]) -> None:
    books, web = corpora
    plan = blended(tmp_path, (books, 0.75), (web, 0.25), iterations=1000, split="90,5,5")
    rows = [line.split() for line in str(plan).splitlines()]
    (first, second), others = (
        [row for row in rows if "train" in row[:2]],
        [row for row in rows if row[1:2] != ["train"]],
    )
    lengths = [len(document) for document in byte_documents(200)]
    for row, prefix, share, documents, taken in (
        (first, books, "75.0%", 36, 6000),
        (second, web, "25.0%", 180, 2000),
    ):
        tokens = sum(lengths[:documents])
        samples = (tokens - 1) // 16
        numbers = [documents, tokens, samples, taken]
        assert row == [str(prefix), "train", share, *(f"{n:,}" for n in numbers), f"{taken / samples:.2f}"]
    assert [row[:4] for row in others[-4:]] == [
        [str(prefix), part, *rest]
        for part in ("valid", "test")
        for prefix, rest in ((books, ["75.0%", "2"]), (web, ["25.0%", "10"]))
    ]
    # the test part is the last documents in their own order; validation ends before a corpus is seen twice
    valid, test = plan.data.valid, plan.data.test
    assert test is not None
    assert np.array_equal(test.parts[0].sample(0), np.concatenate(byte_documents(40)[-2:])[:17])
    assert valid.taken(valid.per_epoch, 0) <= valid.parts[0].per_epoch < valid.taken(valid.per_epoch + 2, 0)


@pytest.mark.parametrize("split", ["90,10,0", "39,0,1"])
def test_a_run_without_a_whole_test_sample_says_that_it_has_no_test_part(tmp_path: Path, split: str) -> None:
    write_corpus(tmp_path / "web", [*byte_documents(39), np.array([1, 2, 256], np.uint16)])
    plan = blended(tmp_path, (tmp_path / "web", 1), split=split)
    assert plan.data.test is None
    assert str(plan).splitlines()[-1].startswith(f"no test part: train.split {split}")


@pytest.mark.parametrize(
    ("data", "train", "names"),
    [
        ([("books", 1), ("books", 2)], {}, "books is named twice"),
        ([("books", 0)], {}, r"data\.0\.weight"),
        ([("books", 1), ("none", 1)], {}, r"none\.idx: no such file"),
        ([("books", 1), ("short", 1)], {"split": "1,0,0"}, "short: .* 3 tokens in 1 documents"),
        ([("books", 1), ("short", 1)], {}, r"90,10,0 has 2 parts, but .*short has 1 doc"),
        ([("books", 1), ("other", 1)], {}, "books with token 256 and .*other with token 3"),
        ([("open", 1)], {"eod_mask_loss": True}, r"open: document 0 .*models\.tiny\.train\.eod_mask_loss"),
        ([("open", 1)], {"reset_position_ids": True}, r"models\.tiny\.train\.reset_position_ids"),
    ],
)
def test_corpora_that_do_not_fit_stop_before_anything_is_computed(
    tmp_path: Path, corpora: tuple[Path, Path], data: list[tuple[str, float]], train: dict[str, object], names: str
) -> None:
    write_corpus(tmp_path / "short", [np.array([1, 2, 256], np.uint16)])
    write_corpus(tmp_path / "open", [document[:-1] for document in byte_documents(40)])
    with IndexWriter(tmp_path / "other", np.uint16, Meta(257, 3)) as writer:
        for document in byte_documents(40):
            writer.add_document(np.append(document[:-1], 3))
    with pytest.raises(ToolkitError, match=names):
        blended(tmp_path, *((tmp_path / name, weight) for name, weight in data), **train)
