from pathlib import Path

from common.settings import DedupSettings
from corpus.dedup.run import dedup
from tests.helpers import document, prose, read_rejects, read_shard, write_shard


def test_the_longest_survives_and_of_equally_long_ones_the_smallest_id_whatever_their_order(tmp_path: Path) -> None:
    words = prose(3, 100).split()
    # a chain: each text has most words of the one before, the ends have little in common
    chain = [document(number, " ".join(words[number * 7 : number * 7 + 50])) for number in range(6)]
    longest = max(chain, key=lambda one: len(one["text"]))
    twins = [document(number, prose(4, 50)) for number in (9, 7, 8)]
    for number, documents in enumerate(([*chain, *twins], [*twins[::-1], *chain[::-1]])):
        source = write_shard(tmp_path / f"{number}.jsonl.zst", documents)
        stats = dedup([source], tmp_path / "out", DedupSettings(threshold=0.6))
        assert {found["id"] for found in read_shard(tmp_path / f"out/{number}.jsonl.zst")} == {
            longest["id"],
            f"{7:016x}",
        }
        removed = {found["id"]: found["reason"] for found in read_rejects(tmp_path / f"out/removed/{number}.jsonl.zst")}
        assert len(removed) == 7 and removed[f"{9:016x}"] != removed[chain[0]["id"]]
        assert stats.extra["largest_cluster"]["documents"] == 6
        assert stats.extra["largest_cluster"]["lowest_similarity"] < 0.4
