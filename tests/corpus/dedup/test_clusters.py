import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.settings import DedupSettings
from common.workers import Workers
from corpus.dedup.clusters import filter_shard, write_clusters
from corpus.dedup.pairs import write_pairs
from corpus.dedup.segments import write_segments
from corpus.dedup.signatures import Signatures, write_signatures
from tests.conftest import ROOT
from tests.helpers import document, prose, read_rejects, read_shard, write_shard

COUNT = 12


@pytest.mark.parametrize("memory", [1.0, 1e-6], ids=["one pass", "several passes"])
def test_whatever_the_edges_every_cluster_has_one_survivor_and_nothing_is_lost(tmp_path: Path, memory: float) -> None:
    rules = DedupSettings(memory_gb=memory)
    documents = [document(number, prose(number, 20)[: 90 + number % 3]) for number in range(COUNT)]
    shard = write_shard(tmp_path / "a.jsonl.zst", documents)
    write_signatures(shard, tmp_path / "a.signatures", rules, Workers(1))
    signatures = Signatures([tmp_path / "a.signatures"], rules)
    write_pairs(signatures, tmp_path / "0.pairs", rules, 0, 1)

    @settings(max_examples=30)
    @given(st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)), max_size=15))
    def check(drawn: list[tuple[int, int]]) -> None:
        edges = [pair for pair in drawn if pair[0] != pair[1]]
        cluster = list(range(COUNT))  # of each document
        for one, other in edges:
            cluster = [cluster[one] if number == cluster[other] else number for number in cluster]
        with write_segments(tmp_path / "0.edges", {"candidates": 0, "signatures": signatures.digest}) as file:
            file.append("edges", np.array(edges, dtype=np.int64).ravel())
        write_clusters(signatures, [tmp_path / "0.pairs"], [tmp_path / "0.edges"], tmp_path / "clusters", rules)
        filter_shard(shard, tmp_path / "clusters", tmp_path / "out")
        kept, removed = read_shard(tmp_path / "out/a.jsonl.zst"), read_rejects(tmp_path / "out/removed/a.jsonl.zst")
        survivor = {found["id"]: found.get("survivor", found["id"]) for found in kept + removed}
        assert len(kept) + len(removed) == COUNT
        for number, one in enumerate(documents):
            mates = [other for other, found in zip(documents, cluster, strict=True) if found == cluster[number]]
            best = min(mates, key=lambda other: (-len(other["text"]), other["id"]))
            assert survivor[one["id"]] == best["id"]

    check()


def test_a_full_disk_is_an_error_and_no_bus_error(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from corpus.dedup.clusters import Forest
try:
    Forest(10**6, Path(sys.argv[1]))
except OSError as error:
    print(error.strerror, error.filename)
"""
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1" || exit 99; exec "$0" -c "$2" "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, sys.executable, str(tmp_path), program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode in (1, 99):
        pytest.skip(f"no disk of one's own here: {done.stderr}")
    assert (done.returncode, done.stdout) == (0, f"No space left on device {tmp_path}\n"), done.stderr
