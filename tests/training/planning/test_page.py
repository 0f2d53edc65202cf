"""The page is one file that fetches nothing; its figures show every part of every layout."""

import re

from common.settings import ModelSettings
from training.planning.machines import machine
from training.planning.memory import PARTS
from training.planning.page import plan_page
from training.planning.roofline import work_of
from training.planning.search import Question, search
from training.planning.workload import Workload


def test_every_part_of_every_layout_is_drawn_and_nothing_is_fetched() -> None:
    workload = Workload(ModelSettings(n_layer=12, n_head=12, n_embd=768), "bfloat16", compiled=True)
    predictions = search(workload, machine("a100-40g", {}), Question(8, 512))[:4]
    page = plan_page("one <b>run</b>", [("GPUs", "8 x a100-40g")], predictions, 1e9, "Fits & is fast.")
    titles = re.findall(r"<g><title>([^<]*)</title>", page)
    assert len(titles) == len(predictions) * len(PARTS) + len(work_of(workload, predictions[0].layout))
    assert all(f">{text}</text>" in page for text in ("80%", "92%", "39 GiB"))
    assert f"<td>{predictions[0].memory_bytes / 2**30:.2f}</td>" in page
    assert "one &lt;b&gt;run&lt;/b&gt;" in page and "Fits &amp; is fast." in page
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)|(src|href)=\"(?!#)", page)
    assert plan_page("one <b>run</b>", [("GPUs", "8 x a100-40g")], predictions, 1e9, "Fits & is fast.") == page
