from pathlib import Path

import pytest

from common.errors import EmptyResultError
from common.files import Document, document_writer, read_json
from corpus.runner import Drop, Outcome, ShardStep, grouped
from tests.helpers import document, prose, read_rejects, read_shard, write_shard


def shout(document: Document) -> Outcome:
    """A whole step: texts in capitals, short ones dropped."""
    text = document["text"].upper()
    return {**document, "text": text} if len(text) > 5 else Drop(document, "short", f"{len(text)} characters")


def test_a_step_is_a_function_and_the_runner_does_the_rest_whatever_the_workers(tmp_path: Path) -> None:
    texts = [[prose(100 * n + m, m % 9 * 10) for m in range(90)] for n in range(2)]
    sources = [
        write_shard(tmp_path / f"{n}.zst", [document(100 * n + m, text) for m, text in enumerate(part)])
        for n, part in enumerate(texts)
    ]
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        step = ShardStep("shout", sources, folder / "rejects", workers)
        step.run(shout, document_writer(folder / "out")).finish(folder / "stats.json")
    for name in ("out", "rejects"):
        assert (tmp_path / f"1/{name}").read_bytes() == (tmp_path / f"3/{name}").read_bytes()
    kept = [text.upper() for part in texts for text in part if len(text) > 5]
    assert [found["text"] for found in read_shard(folder / "out")] == kept and len(kept) == 160
    rejects, stats = read_rejects(folder / "rejects"), read_json(folder / "stats.json")
    assert rejects[1] == document(9, ".", reason="short", detail="1 characters")
    assert (stats["documents_in"], stats["documents_out"], stats["reasons"]) == (180, 160, {"short": 20})
    assert stats["examples"]["short"] == rejects[:10]


def test_a_step_that_ends_empty_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    sources = [write_shard(tmp_path / "in", [document(1, "x")]), write_shard(tmp_path / "more", [])]
    for inputs, said in ((sources, r"in .*1 short"), (sources[1:], "more")):
        with pytest.raises(EmptyResultError, match=said):
            ShardStep("shout", inputs, tmp_path / "rejects").run(shout, document_writer(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "more"]
    ShardStep("shout", sources, allow_empty=True).run(shout, document_writer(tmp_path / "out"))
    assert read_shard(tmp_path / "out") == []


def test_items_are_grouped_until_their_sizes_reach_the_limit() -> None:
    assert list(grouped([3, 1, 5, 1, 1], int, 4)) == [[3, 1], [5], [1, 1]]
