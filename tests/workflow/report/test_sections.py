"""Each section says what the files of the run say."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.workflow.report.fake_run import BEGAN, finished_run
from workflow.report.__main__ import render
from workflow.report.models import Curve, trained_models
from workflow.report.timing import Job, Work, timeline
from workflow.report.training import comparisons, memory_chart


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("run") / "mine")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return render(run)


PARTS = """
    overview   | 2023-11-14 22:15
    overview   | 51.6 s
    overview   | <dd>80,000</dd>
    overview   | <dd>409,600</dd>
    overview   | <dd>4.5000</dd>
    overview   | <dt>epochs</dt><dd>3.20</dd>
    overview   | <dt>bits per byte</dt><dd>2.5200</dd>
    overview   | <dd>2 x CPU on n1</dd>
    overview   | <dd>012345678901-dirty</dd>
    overview   | <dt>training loss (nats)</dt><dd>4.1
    overview   | <p>tiny: the validation loss is 0.4
    overview   | above the training loss after 3.2 epochs
    overview   | <blockquote class="sample"><b>Once &lt;upon&gt;</b> a &lt;b&gt;time&lt;/b&gt; there was.
    funnel     | clean: 182 of 190 documents kept (95.8%), 164 kB
    funnel     | 8 short
    funnel     | kept (100.0%), 80,000 tokens
    funnel     | <div class="bar thin" style="width:5%;margin-left:95%"
    funnel     | 6 timeout</span>
    funnel     | scrape%2C200%2C190%2C95.0%2C%2C171000%2C%226%20timeout%2C%204%20http_404%22%0A
    corpus     | texts/a.txt (binary data)
    corpus     | &lt;b&gt;short
    corpus     | <th scope="row">h1.example</th><td>10</td><td>4</td><td>6</td>
    corpus     | similarity 0.81
    corpus     | <mark>a &lt;copy&gt;</mark>
    corpus     | <td>1 Ki</td><td>2</td>
    corpus     | <th scope="col">value</th><th scope="col">out of clean</th>
    corpus     | <td>source</td><td>&lt;a&gt;</td><td>90</td>
    corpus     | <td>source</td><td>others, or none given</td><td>2</td><td>170</td><td>80,000</td>
    corpus     | <td>lambada</td><td>3</td><td>2</td>
    corpus     | similarity to the kept one is 0.71
    layout     | activations 95.4 MiB
    layout     | tiny: 248.0 MiB per process predicted, and 381.5 MiB for the process itself
    layout     | layout  one &lt;process&gt;
    checkpoint | 8,551,096
    checkpoint | xxh3_of_the_weights
    checkpoint | within 6.7e-06
    checkpoint | 3 of 3 compared are equal
    results    | perplexity 90.02
    results    | training loss, last interval
    results    | <td class="words">acc</td><td>0.3125</td><td>0.0065</td><td>5,153</td></tr>
    results    | <td class="words">word_perplexity</td><td>37.3700</td><td></td><td>62</td></tr>
    samples    | <b>Once &lt;upon&gt;</b> a &lt;b&gt;time&lt;/b&gt; there was.</blockquote>
    samples    | <details><summary>tiny: 1 of 3 8-grams stand in the training data (33.3%)</summary>
    samples    | 8 tokens &#39; &lt;b&gt;time&#39;: https://a.example/x, first read in iteration 7</li>
"""
"""Sections and what they contain. 10 of 200 pages were dropped: 5 % of the bar's width."""


def test_a_section_says_what_the_files_say(page: str) -> None:
    for name, part in (line.split("|") for line in PARTS.strip().splitlines()):
        section = page.partition(f'<section id="{name.strip()}"')[2].partition("</section>")[0]
        assert part.strip() in section, part
    assert "<b>short" not in page and "<copy>" not in page


def test_the_same_files_give_the_same_bytes(page: str, run: Path) -> None:
    assert render(run) == page


def test_the_plan_stands_beside_what_was_used(run: Path) -> None:
    (model,) = trained_models(run)
    rows = {name: (planned, used) for name, planned, used in comparisons(model)}
    assert rows["layout"] == ("tensor 2", "tensor 2 used")
    assert rows["tokens per second"][0] == "15,000"
    assert rows["starts"] == ("1", "2") and "batch" not in rows


def test_memory_is_compared_on_gpus_alone(run: Path) -> None:
    """On a CPU train.csv has the resident memory, most of which no prediction is about."""
    (on_cpu,) = trained_models(run)
    on_gpu = replace(on_cpu, card={"device": "NVIDIA H100 80GB HBM3"})
    unmeasured = replace(on_gpu, train=Curve({"iteration": on_cpu.train.values("iteration")}))
    for model, compared in ((on_cpu, False), (on_gpu, True), (unmeasured, False)):
        rows = {name: values for name, *values in comparisons(model)}
        assert rows.get("memory per GPU") == (["0.24 GiB", "0.40 GiB at most"] if compared else None)
        used = [bar.above for bar in memory_chart([model])][1:]
        assert used == ["tiny: 412.5 MiB used at most"] * compared, "no bar of a figure that was not measured"


def test_the_timeline_is_that_of_the_logs(run: Path) -> None:
    works = {work.name: work for work in timeline(run, trained_models(run))}
    assert works["blacklist"].started == BEGAN and [job.label for job in works["scrape"].jobs] == ["0000", "0001"]
    assert works["train tiny"].started == BEGAN + 61 and works["train tiny"].ended == BEGAN + 100
    assert works["train tiny"].jobs[0].seconds == pytest.approx(200 * 0.0805), "until its last iteration that was kept"
    merge = works["merge tiny"]
    assert (merge.started, merge.ended, merge.memory_mb) == (BEGAN + 100, BEGAN + 104, 512)
    assert [job.label for job in works["dedup_bands"].jobs] == ["3"]
    assert works["scrape"].spread is None, "two have no median"
    jobs = [Job(str(number), seconds, None, 9) for number, seconds in enumerate((3, 1, 9, 2, 4))]
    assert Work("clean", jobs).spread == (3, jobs[2])


def test_logs_of_failed_attempts_and_of_shards_that_are_gone_are_left_out(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run", shards=3)
    logs = folder / "logs/clean"
    (logs / "0000.attempt1.log").write_text((logs / "0000.log").read_text())
    (logs / "0001.log").write_text("error: no such file\n")
    works = {work.name: work for work in timeline(folder, [], shards=2)}
    assert [job.label for job in works["clean"].jobs] == ["0000"]
    assert [job.label for job in works["dedup_bands"].jobs] == ["3"]  # a part of all shards
