"""Each section says what the files of the run say."""

import os
import re
import time
from pathlib import Path

import pytest

from cluster.training_status import model_status
from common.config import load_settings
from common.files import write_json
from report.__main__ import render
from report.curves import HOVERS, POINTS
from report.layout import comparisons
from report.models import trained_models
from report.overview import split_samples
from report.timing import Clock, spread, timeline
from tests.report.fake_run import BEGAN, finished_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("run") / "mine")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return render(run)


def section(page: str, name: str) -> str:
    return page.partition(f'<section id="{name}"')[2].partition("</section>")[0]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "overview",
            (
                *("2023-11-14 22:15", "51.6 s", "<dd>80,000</dd>", "<dd>409,600</dd>", "<dd>4.5000</dd>"),
                *("<dt>epochs</dt><dd>3.20</dd>", "<dt>bits per byte</dt><dd>2.5200</dd>", "torch 9.9.9"),
                '<blockquote class="sample"><b>Once &lt;upon&gt;</b> a &lt;b&gt;time&lt;/b&gt; there was.',
            ),
        ),
        (
            "funnel",
            (
                *("clean: 182 of 190 documents", "8 dropped: 8 short", "= 80,000 tokens"),
                "<title>scrape: 6 pages dropped: timeout</title>",
            ),
        ),
        ("layout", ("tiny: activations 0.0931 GiB predicted", "layout  one &lt;process&gt;")),
        ("checkpoint", ("8,551,096", "2d" * 16, "within 6.7e-06", "3 of 3 compared are equal")),
        ("results", ("perplexity 90.02", "training loss, last interval")),
    ],
)
def test_a_section_says_what_the_files_say(page: str, name: str, parts: tuple[str, ...]) -> None:
    for part in parts:
        assert part in section(page, name), part


def test_several_samples_are_told_apart(run: Path) -> None:
    settings = load_settings(run / "config.yaml")
    text = "--- sample 1, seed 1\nOnce <upon> a\ntime\n--- sample 2, seed 2\nOnce again\n"
    found = [("sample 1, seed 1", "Once <upon>", " a\ntime"), ("sample 2, seed 2", "", "Once again")]
    assert split_samples(text, settings) == found


def test_the_plan_stands_beside_what_was_used(run: Path) -> None:
    (model,) = trained_models(run)
    rows = {row.name: (row.planned, row.used) for row in comparisons(model)}
    assert rows["layout"] == ("tensor 2", "tensor 2 used")
    assert rows["memory per process"] == ("0.24 GiB", "0.38 GiB at most")
    assert rows["tokens per second"][0] == "15,000"
    assert rows["starts"] == ("1", "2")


def test_the_timeline_is_that_of_the_logs(run: Path) -> None:
    works = {work.name: work for work in timeline(run, trained_models(run))}
    assert works["blacklist"].started == BEGAN and [job.label for job in works["scrape"].jobs] == ["0000", "0001"]
    assert works["train tiny"].started == BEGAN + 61 and works["train tiny"].ended == BEGAN + 100
    merge = works["merge tiny"]
    assert (merge.started, merge.ended, merge.memory_mb) == (BEGAN + 100, BEGAN + 104, 512)
    assert [job.label for job in works["dedup_bands"].jobs] == ["3"]
    low, middle, high = spread(works["scrape"])
    assert low is not None and high is not None and 2 <= low < high <= 3 and middle is None, "two have no median"


def test_a_finished_training_that_was_started_again_lasts_no_longer(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    os.utime(folder / "models/tiny/train.csv", (BEGAN + 99, BEGAN + 99))
    os.utime(folder / "models/tiny/done.json", (BEGAN + 9000, BEGAN + 9000))
    assert max(work.ended for work in timeline(folder, trained_models(folder))) == BEGAN + 110


def test_time_in_which_nothing_ran_is_left_out_also_between_the_starts_of_a_training(run: Path) -> None:
    works = timeline(run, trained_models(run))
    clock = Clock(works)
    assert [clock.at(BEGAN + second) for second in (0, 1, 9)] == [0, 1, 1]
    (train,) = (work for work in works if work.name == "train tiny")
    assert [job.label for job in train.jobs] == ["start 1", "start 2"]
    assert train.jobs[0].seconds == pytest.approx(200 * 0.0805), "the time of its iterations; the second began at 90 s"
    assert clock.at(BEGAN + 90) - clock.at(BEGAN + 61) == pytest.approx(16.1)


def test_logs_of_failed_attempts_and_of_shards_that_are_gone_are_left_out(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run", shards=3)
    logs = folder / "logs/clean"
    (logs / "0000.attempt1.log").write_text((logs / "0000.log").read_text())
    (logs / "0001.log").write_text("error: no such file\n")
    works = {work.name: work for work in timeline(folder, [], shards=2)}
    assert [job.label for job in works["clean"].jobs] == ["0000"]
    assert [job.label for job in works["dedup_bands"].jobs] == ["3"]  # a part of all shards


def test_the_results_and_the_run_card(run: Path, tmp_path: Path, page: str) -> None:
    results = section(page, "results")
    losses = [f"{float(text):.2f}" for text in re.findall(r"<td>(\d\.\d{4})</td>", results)]
    assert losses[1:] == ["4.50", "4.51", "2.52", "4.37"]
    status = model_status(run / "models/tiny", None, None)
    assert f"{status['valid_loss']:.4f}" == "4.5000", "the figure that cluster.status shows"
    folder = finished_run(tmp_path / "other")
    write_json(folder / "run.json", {"versions": {"torch": "1.2.3"}, "commit": "abc<"})
    with_card = section(render(folder), "configuration")
    assert "torch 1.2.3" in with_card and "abc" in with_card and "abc<" not in with_card


def test_the_same_run_gives_the_same_page(run: Path, page: str) -> None:
    assert render(run) == page


@pytest.mark.slow
def test_ten_thousand_shards_and_a_long_curve_give_a_small_page(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "big", shards=10_000, rows=300_000)
    begin = time.process_time()
    page = render(folder)
    assert time.process_time() - begin < 30
    assert len(page.encode()) < 3_000_000
    points = [len(re.findall("[ML]", path)) for path in re.findall(r' d="([^"]*)"', page)]
    assert max(points) <= POINTS + 10  # matplotlib adds points where it clips a line
    for figure in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        assert figure.count("<title>") <= HOVERS + 100
    assert "10,000 shards" in page
