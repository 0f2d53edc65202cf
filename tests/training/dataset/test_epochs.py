"""A training that reads its text too often is told how many iterations would do."""

import re
from pathlib import Path

from tests.training.helpers import byte_documents, make_run, plan_of, settings_of, write_corpus
from training.dataset import epochs
from training.planning.run import make_plan


def test_a_plan_with_too_many_epochs_says_how_many_iterations_make_four(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    data = plan_of(config).data.train
    enough = 16 * data.per_epoch // 8  # iterations
    assert "is read" not in plan_of(config, f"train.iterations={enough}").text()
    for many in (enough + 8, 100 * data.per_epoch // 8):
        plan = plan_of(config, f"train.iterations={many}")
        (told,) = [line for line in plan.text().splitlines() if line.startswith("epochs ")]
        said = f"the text is read {many * 8 / data.per_epoch:.0f} times; 4 times are nearly as good as new text"
        found = re.search(r"set models\.tiny\.train\.iterations to (\d+) for 4,", told)
        assert said in told and found
        assert 3.9 < int(found[1]) * 8 / data.per_epoch <= 4
    # a resumed run counts what it has read with another batch
    assert "is read" in plan_of(config).text(1, 17 * data.per_epoch)


def test_the_corpus_of_a_blend_that_repeats_first_counts(tmp_path: Path) -> None:
    """And the indices of the datasets are enough to know it."""
    write_corpus(tmp_path / "small", byte_documents(40))
    write_corpus(tmp_path / "large", byte_documents(400))
    both = [{"prefix": str(tmp_path / name), "weight": 0.5} for name in ("small", "large")]
    for data, repeats in ((both, True), (both[1:], False)):
        settings = settings_of(make_run(tmp_path / "run", train={"iterations": 4000}, data=data))
        plan = make_plan(settings, "tiny")
        assert ("is read" in plan.text()) == repeats
        told = epochs.of_datasets(settings.experiment("tiny"), "tiny", settings.datasets("tiny"))
        assert told == epochs.too_many_epochs(plan.experiment.train, "tiny", plan.data.train, 32_000)
        assert bool(told) == repeats
