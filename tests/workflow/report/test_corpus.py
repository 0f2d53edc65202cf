from collections import Counter
from pathlib import Path

from common.files import write_json
from common.stats import Stats
from workflow.report.__main__ import render
from workflow.report.corpus import corpus_figures
from workflow.report.funnel import funnel


def run_folder(folder: Path) -> Path:
    """A run with the statistics of two shards of clean, and those of dedup and decontaminate."""
    for shard in range(2):
        stats = Stats("clean", extra={"languages": {"en": 5, "de": shard}})
        for number in range(8):
            size = 100 << number
            list(stats.counted([{"text": "x" * size}]))
            if number == shard:
                stats.drop("short", {"id": f"{7 - shard}", "url": f"http://a.example/{shard}", "text": "<b>short</b>"})
            else:
                stats.keep({"text": "x" * size, "meta": {"source": f"<{number % 2}>"} if number else {}})
        stats.finish(folder / "clean" / f"000{shard}.stats.json")
    stats = Stats("dedup", documents_in=14, documents_out=12, sizes_out=Counter({9: 12}))
    stats.finish(folder / "dedup/0000.stats.json")
    largest = {"documents": 9, "lowest_similarity": 0.7123, "ids": ["a"]}
    sizes = {"1": 3, "2": 2, "6": 1, "9": 1}
    write_json(folder / "dedup/clusters.json", {"cluster_sizes": sizes, "largest_cluster": largest})
    sets = {"lambada": {"hits": 3, "documents": 2, "ngrams": 9, "ignored": 0}}
    figures = Stats("decontaminate", documents_in=12, documents_out=12).as_dict()
    figures["examples"] = {"binary": [{"origin": "texts/a.txt", "detail": "binary data"}]}  # a file of ingest's
    write_json(folder / "decontaminate/0000.stats.json", {**figures, "evaluation_sets": sets})
    return folder


def test_the_statistics_of_all_shards_are_summed(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    steps = funnel(folder)
    found = corpus_figures(folder, steps)
    assert found.languages == [("en", 10), ("de", 1)]
    assert found.lengths[:3] == [("64", 2, 0), ("128", 2, 0), ("256", 2, 12)]
    assert found.clusters == [("1", 3), ("2", 2), ("4 to 7", 1), ("8 to 15", 1)]
    ((name, counts),) = steps[-1].evaluation_sets.items()
    assert (name, counts) == ("lambada", {"hits": 3, "documents": 2})
    ((reason, documents),) = steps[0].examples.items()
    assert (steps[0].name, reason, [d["id"] for d in documents]) == ("clean", "short", ["6", "7"])


def test_the_page_shows_them_and_escapes_what_was_scraped(tmp_path: Path) -> None:
    page = render(run_folder(tmp_path))
    for part in (
        "8 to 15",
        "similarity seen inside it is 0.71",
        "<td>lambada</td><td>3</td><td>2</td>",
        "clean: short",
        "texts/a.txt (binary data)",
        "<td>source</td><td>&lt;1&gt;</td><td>7</td>",
        "<td>source</td><td>others, or none given</td><td>1</td><td>0</td>",
        "&lt;b&gt;short",
    ):
        assert part in page
    assert "<b>short" not in page
