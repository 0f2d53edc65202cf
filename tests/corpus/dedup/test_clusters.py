from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.settings import DedupSettings
from corpus.dedup.clusters import Forest
from corpus.dedup.run import dedup
from tests.helpers import document, prose, read_rejects, write_shard


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60), st.integers(1, 5))
def test_rows_joined_by_edges_have_one_root_their_smallest(
    tmp_path_factory: pytest.TempPathFactory, edges: list[tuple[int, int]], chunk: int
) -> None:
    forest = Forest(31, tmp_path_factory.getbasetemp())
    expected = list(range(31))
    for first, second in edges:
        low, high = sorted((expected[first], expected[second]))
        expected = [low if root == high else root for root in expected]
    for start in range(0, len(edges), chunk):
        forest.join(np.array(edges[start : start + chunk], dtype=np.int64).reshape(-1, 2))
    assert forest.roots(np.arange(31)).tolist() == expected


def test_survivors_do_not_depend_on_the_memory(tmp_path: Path) -> None:
    texts = [prose(number % 20, 60) + " again" * (number % 3) for number in range(80)]
    shards = [
        write_shard(
            tmp_path / f"{shard}.jsonl.zst", [document(n, text) for n, text in enumerate(texts) if n % 4 == shard]
        )
        for shard in range(4)
    ]
    written = []
    for name, settings in (("much", DedupSettings()), ("little", DedupSettings(memory_gb=1e-6))):
        stats = dedup(shards, tmp_path / name, settings)
        assert stats.documents_out == 20
        written.append([path.read_bytes() for path in sorted((tmp_path / name).rglob("*.zst"))])
    assert written[0] == written[1] and len(written[0]) == 8


def test_a_giant_cluster_is_warned_of_and_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("corpus.dedup.clusters._GIANT", 5)
    words = prose(3, 100).split()
    # a chain: each text has most words of the one before, the ends have little in common
    documents = [document(number, " ".join(words[number * 7 : number * 7 + 50])) for number in range(6)]
    source = write_shard(tmp_path / "in.jsonl.zst", documents)
    stats = dedup([source], tmp_path / "out", DedupSettings(threshold=0.6))
    largest = stats.extra["largest_cluster"]
    assert largest["documents"] == 6 and largest["lowest_similarity"] < 0.4
    assert "a cluster of 6 documents" in capsys.readouterr().err
    assert len(read_rejects(tmp_path / "out" / "removed" / "in.jsonl.zst")) == 5
