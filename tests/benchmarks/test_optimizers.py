"""benchmarks.optimizers: which learning rates are tried, and when Muon has AdamW's loss."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import optimizers
from benchmarks.optimizers import MODELS, RATES, SHORTER, Study, Training, measure, tokens_needed, tune
from common.files import read_rows
from tests.training.helpers import make_run


class Imagined(Study):
    """Losses as if the best learning rate were 0.016, and Muon needed .64 of the tokens, with a seed of exceptions."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.trained = list[Training]()

    def train(self, trainings: Iterable[Training]) -> None:
        self.trained += trainings

    def loss(self, training: Training) -> float:
        share = training.share / (0.64 if training.optimizer == "muon" else 1)
        return 3 - math.log(share) + math.log2(training.rate / 0.016) ** 2 + 0.1 * training.seed

    def milliseconds(self, training: Training) -> float:
        return 110.0 if training.optimizer == "muon" else 100.0


def test_learning_rates_are_tried_until_the_best_one_has_neighbours() -> None:
    found = tune(Imagined(), "small", {"adamw": [0.016], "muon": RATES})
    assert [each.rate for each in found["muon"]] == [*RATES, 0.016, 0.032]
    assert [each.rate for each in found["adamw"]] == [0.008, 0.016, 0.032]


def test_tokens_are_interpolated_in_their_logarithm() -> None:
    study, muon = Imagined(), Training("small", "muon", 0.016, 2)
    of_adamw = study.loss(muon._replace(optimizer="adamw"))
    assert tokens_needed(study, muon, of_adamw) == pytest.approx(0.64)
    assert tokens_needed(study, muon, of_adamw + 9) == SHORTER[0]
    assert tokens_needed(study, muon, of_adamw - 9) == math.inf


def test_a_row_has_what_the_seeds_need() -> None:
    study = Imagined()
    tables = [*measure(study)]
    tried = [[row["learning rate"] for row in rates] for rates in tables[::2]]
    assert tried == [[*RATES, 0.016, 0.032], *2 * [[0.008, 0.016, 0.032]]]
    assert [row["model"] for (row,) in tables[1::2]] == [*MODELS]
    for (row,) in tables[1::2]:
        assert row["adamw"] == pytest.approx(3.2) and row["adamw, seeds"] == pytest.approx((3.1, 3.3))
        assert row["seeds"] == pytest.approx((0.64, 0.64))
        assert row["for adamw's loss"] == pytest.approx(0.64 * 1.1)
    assert {each.optimizer for each in study.trained if each.share < 1} == {"muon"}


@pytest.mark.slow
def test_a_shorter_training_begins_in_the_long_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "ITERATIONS", 20)
    study = Study(tmp_path)
    config = make_run(study.run, train={"iterations": 20, "save_interval": 4, "log_interval": 1, "lr_decay": "wsd"})
    study.config = config
    whole = Training("tiny", "muon", 0.01, 2)
    study.train([whole])
    study.train([short := whole._replace(share=0.5)])
    curve, straight = (read_rows(study.run / "models" / each.name / "train.csv") for each in (short, whole))
    assert [int(row["iteration"]) for row in curve] == [9, 10]
    assert curve[0]["lm_loss"] == straight[8]["lm_loss"] and float(curve[1]["learning_rate"]) < 0.01
    assert study.loss(short) > 0 and study.milliseconds(short) > 0
