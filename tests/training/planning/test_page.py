"""The page is one file that fetches nothing; its figures show every part of every layout, its tables the numbers."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser

import pytest

from common.settings import ModelSettings
from training.planning.machines import machine
from training.planning.memory import PARTS
from training.planning.page import plan_page
from training.planning.roofline import work_of
from training.planning.search import Prediction, Question, search
from training.planning.workload import Workload


@pytest.fixture(scope="module")
def predictions() -> Sequence[Prediction]:
    workload = Workload(ModelSettings(n_layer=12, n_head=12, n_embd=768), "bfloat16", compiled=True)
    return search(workload, machine("a100-40g", {}), Question(8, 512))[:4]


def plan(predictions: Sequence[Prediction]) -> str:
    return plan_page("one <b>run</b>", [("GPUs", "8 x a100-40g")], predictions, 1e9, "Fits & is fast.")


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


def test_the_page_fetches_nothing_escapes_its_text_and_is_the_same_for_the_same_plan(
    predictions: Sequence[Prediction],
) -> None:
    page = plan(predictions)
    tags = Tags(page).found
    for tag, attributes in tags:
        assert tag not in ("script", "link", "img", "iframe")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert ids and len(ids) == len(set(ids))
    assert "one &lt;b&gt;run&lt;/b&gt;" in page and "Fits &amp; is fast." in page
    assert plan(predictions) == page


def test_every_part_of_every_bar_and_every_limit_is_drawn_and_read_aloud(predictions: Sequence[Prediction]) -> None:
    page = plan(predictions)
    titles = re.findall(r"<g><title>([^<]*)</title>", page)
    assert len(titles) == len(predictions) * len(PARTS) + len(work_of(predictions[0].workload, predictions[0].layout))
    assert any(re.fullmatch(r"1: optimizer \d+\.\d\d GiB of 39\.\d", title) for title in titles)
    assert all(f">{text}</text>" in page for text in ("80%", "92%", "39 GiB"))
    figures = [attributes for tag, attributes in Tags(page).found if tag == "svg"]
    assert len(figures) == 2 and all(one["role"] == "img" and one["aria-label"] for one in figures)
    assert f"<td>{predictions[0].memory_bytes / 2**30:.2f}</td>" in page


def test_matrix_products_are_bound_by_the_peak_and_the_optimizer_by_the_memory(
    predictions: Sequence[Prediction],
) -> None:
    where = predictions[0].machine
    large = predictions[0].layout._replace(micro_batch_size=8)
    reached = {work.name: work.attainable(where, "bfloat16") for work in work_of(predictions[0].workload, large)}
    assert reached["matrix products"] == where.peak_flops("bfloat16")
    assert reached["optimizer"] == 0.5 * 1e9 * where.gpu.memory_gb_per_s  # 14 operations per 28 bytes
