from pathlib import Path

import pytest

from common.errors import EmptyResultError, InputError
from common.files import Document, document_writer, read_json
from common.workers import Workers
from corpus.runner import Drop, Outcome, Step, map_shards
from tests.helpers import document, prose, read_rejects, read_shard, write_shard


def shout(document: Document) -> Outcome:
    """A whole step: texts in capitals, short ones dropped."""
    text = document["text"].upper()
    return {**document, "text": text} if len(text) > 5 else Drop(document, "short", f"{len(text)} characters")


def test_a_step_is_a_function_and_the_runner_does_the_rest(tmp_path: Path) -> None:
    shards = [
        write_shard(tmp_path / f"{n}.zst", [document(10 * n, prose(n)), document(10 * n + 1, "x" * n)])
        for n in range(3)
    ]
    stats = Step("shout", shards, tmp_path / "rejects").run(shout, document_writer(tmp_path / "out"))
    assert [found["text"] for found in read_shard(tmp_path / "out")] == [prose(n).upper() for n in range(3)]
    rejects = read_rejects(tmp_path / "rejects")
    assert rejects[1] == document(11, "x", reason="short", finding="1 characters")
    stats.finish(tmp_path / "stats.json")
    written = read_json(tmp_path / "stats.json")
    assert (written["documents_in"], written["documents_out"], written["reasons"]) == (6, 3, {"short": 3})
    assert written["examples"]["short"] == rejects


@pytest.mark.parametrize("workers", [2, 3])
def test_the_worker_count_changes_no_byte(tmp_path: Path, workers: int) -> None:
    source = write_shard(tmp_path / "in", [document(n, prose(n, n % 9)) for n in range(200)])
    for count in (1, workers):
        writer = document_writer(tmp_path / f"out{count}")
        Step("shout", [source], tmp_path / f"rejects{count}").run(shout, writer, count)
    for name in ("out", "rejects"):
        assert (tmp_path / f"{name}1").read_bytes() == (tmp_path / f"{name}{workers}").read_bytes() != b""


def test_many_shards_stream_through_one_pool(tmp_path: Path) -> None:
    shards = [[document(100 * shard + n, prose(n)) for n in range(40 * shard)] for shard in range(3)]
    with Workers(2) as pool:
        for shard, outcomes in zip(shards, map_shards(shout, shards, pool), strict=True):
            assert list(outcomes) == [shout(document) for document in shard]


def test_bad_lines_are_counted_and_limited(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"id": "1", "text": "long enough"}\n{"id": "2"}\n')
    stats = Step("shout", [tmp_path / "in"], max_bad_share=0.5).run(shout, document_writer(tmp_path / "out"))
    assert stats.extra == {"bad_lines": 1} and stats.documents_in == 1
    with pytest.raises(InputError, match=r"in:2: no string under 'text'; 1 of 2 lines are bad"):
        Step("shout", [tmp_path / "in"], max_bad_share=0.4).run(shout, document_writer(tmp_path / "no"))
    assert not (tmp_path / "no").exists()


def test_a_step_that_ends_empty_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    sources = [write_shard(tmp_path / "in", [document(1, "x")]), write_shard(tmp_path / "more", [])]
    step = Step("shout", sources, tmp_path / "rejects", cure="shout louder")
    with pytest.raises(EmptyResultError, match=r"in …: none of 1 documents is left \(1 short\); shout louder$"):
        step.run(shout, document_writer(tmp_path / "out"))
    with pytest.raises(EmptyResultError, match=r"more: no documents inside$"):
        Step("shout", sources[1:]).run(shout, document_writer(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "more"]
    Step("shout", sources, allow_empty=True).run(shout, document_writer(tmp_path / "out"))
    assert read_shard(tmp_path / "out") == []
