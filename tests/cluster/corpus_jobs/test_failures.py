from pathlib import Path

import pytest

from cluster.corpus_jobs.batches import Request, Shard, Task
from cluster.corpus_jobs.dag_jobs import ShardJob
from cluster.corpus_jobs.failures import blames_shard


@pytest.mark.parametrize(
    ("nodes", "works", "failed"),
    [
        ("abc", False, "001"),  # they share a fault
        ("abcde", True, "00000"),  # five of many
        ("abca", True, "0001"),  # no other node was left
        (["", "", ""], True, "001"),
    ],
)
def test_a_shard_that_meets_broken_nodes_fails_when_they_share_a_fault_or_no_other_is_left(
    nodes: str, works: bool, failed: str
) -> None:
    request = Request(1, None, None)
    shard = Shard("key", "0000", "clean", "true", "/bin/sh", 1, [])
    item, found = ShardJob(None, shard, request), ""
    for node in nodes:
        task = Task(Path("batch"), 0, [shard], request, node=node)
        found += str(int(blames_shard(item, 0, task, "FAILED", works)))
    assert found == failed
