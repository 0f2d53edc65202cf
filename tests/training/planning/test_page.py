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


@pytest.fixture(scope="module")
def page(predictions: Sequence[Prediction]) -> str:
    return plan_page("one <b>run</b>", [("GPUs", "8 x a100-40g")], predictions, 1e9, "Fits & is fast.")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def tags_of(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = _Tags()
    parser.feed(page)
    return parser.tags


def test_the_page_fetches_nothing(page: str) -> None:
    for tag, attributes in tags_of(page):
        assert tag not in ("script", "link", "img", "iframe")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert "@import" not in page and not re.search(r"url\((?!#)", page)


def test_the_page_is_for_light_and_dark_and_for_telephones(page: str) -> None:
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert page.count("currentColor") > 50  # text and axes of the figures take the colour of the page's text
    assert "#222223" not in page


def test_every_part_of_every_bar_and_every_point_has_a_hover_text(page: str, predictions: Sequence[Prediction]) -> None:
    titles = re.findall(r"<g><title>([^<]*)</title>", page)
    assert len(titles) == len(predictions) * len(PARTS) + len(work_of(predictions[0].workload, predictions[0].layout))
    assert any(re.fullmatch(r"1: optimizer \d+\.\d\d GiB of 39\.\d", title) for title in titles)
    assert any(title.startswith("attention: ") for title in titles)


def test_the_limits_are_drawn(page: str) -> None:
    assert all(f">{text}</text>" in page for text in ("80%", "92%", "39 GiB"))


def test_what_the_figures_show_is_read_aloud_and_reached_by_keyboard(
    page: str, predictions: Sequence[Prediction]
) -> None:
    found = tags_of(page)
    figures = [attributes for tag, attributes in found if tag == "svg"]
    assert len(figures) == 2 and all(one["role"] == "img" and one["aria-label"] for one in figures)
    assert [tag for tag, _ in found].count("summary") == 2
    assert all(attributes.get("tabindex") == "0" for tag, attributes in found if attributes.get("class") == "wide")
    assert f"<td>{predictions[0].memory_bytes / 2**30:.2f}</td>" in page


def test_ids_are_unique_and_text_is_escaped(page: str) -> None:
    ids = [attributes["id"] for _, attributes in tags_of(page) if "id" in attributes]
    assert ids and len(ids) == len(set(ids))
    assert "one &lt;b&gt;run&lt;/b&gt;" in page and "Fits &amp; is fast." in page


def test_the_same_plan_gives_the_same_page(page: str, predictions: Sequence[Prediction]) -> None:
    again = plan_page("one <b>run</b>", [("GPUs", "8 x a100-40g")], predictions, 1e9, "Fits & is fast.")
    assert again == page


def test_matrix_products_are_bound_by_the_peak_and_the_optimizer_by_the_memory(
    predictions: Sequence[Prediction],
) -> None:
    where = predictions[0].machine
    large = predictions[0].layout._replace(micro_batch_size=8)
    reached = {work.name: work.attainable(where, "bfloat16") for work in work_of(predictions[0].workload, large)}
    assert reached["matrix products"] == where.peak_flops("bfloat16")
    assert reached["optimizer"] == 0.5 * 1e9 * where.gpu.memory_gb_per_s  # 14 operations per 28 bytes
