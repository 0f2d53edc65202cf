import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.files import Document
from common.settings import DedupSettings
from corpus.dedup import signatures
from corpus.dedup.__main__ import dedup
from corpus.dedup.shingles import Shingles, jaccard, normalised, shingles
from corpus.dedup.signatures import key_of
from tests.conftest import ROOT
from tests.helpers import document, prose, read_rejects, read_shard, write_shard

RULES = DedupSettings()


def edited(text: str, share: float, seed: int) -> str:
    """The text with a share of its words replaced."""
    rng = random.Random(seed)
    return " ".join(f"x{rng.random():.6f}" if rng.random() < share else word for word in text.split())


def set_of(text: str) -> Shingles:
    """The shingles of a text, by the default rules."""
    return shingles(normalised(text), RULES)


def planted(families: int) -> list[Document]:
    """Families of texts: an original, two near copies, an unrelated text, and an exact copy."""
    documents: list[Document] = []
    for family in range(families):
        original = prose(family)
        texts = [original, edited(original, 0.01, 1), edited(original, 0.02, 2), edited(original, 0.5, 3)]
        texts.append(original.upper())
        documents += [document(len(documents) + number, text) for number, text in enumerate(texts)]
    return documents


def run(
    folder: Path, shards: list[list[Document]], workers: int = 1, rules: DedupSettings = RULES
) -> tuple[list[Document], dict[str, Any]]:
    """Survivors and, with their `survivor`, the removed documents of all shards; and the figures of
    the statistics.
    """
    paths = [write_shard(folder / "in" / f"{n:04d}.jsonl.zst", shard) for n, shard in enumerate(shards)]
    stats = dedup(paths, folder / "out", rules, workers)
    kept = [d for path in paths for d in read_shard(folder / "out" / path.name)]
    removed = [d for path in paths for d in read_rejects(folder / "out" / "removed" / path.name)]
    assert stats.documents_in == len(kept) + len(removed) == sum(map(len, shards))
    assert stats.documents_out == len(kept)
    return kept + removed, stats.extra


def survivor_ids(*arguments: Any, **options: Any) -> dict[str, str]:
    """The survivor of each document of a `run`."""
    return {d["id"]: d.get("survivor", d["id"]) for d in run(*arguments, **options)[0]}


def test_the_longest_of_every_true_cluster_survives_whatever_the_shards_workers_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = planted(6)
    shuffled, expected = random.Random(5).sample(documents, len(documents)), {d["id"]: d["id"] for d in documents}
    for first in range(0, len(documents), 5):  # of a family: the original, two near copies, another text, a copy
        family = [documents[number] for number in (first, first + 1, first + 2, first + 4)]
        best = min(family, key=lambda d: key_of(d["id"], d["text"]))
        expected |= {d["id"]: best["id"] for d in family}
    near: list[Any] = []
    for name, shards, workers, more in (
        ("one", [documents], 1, {}),
        ("three", [shuffled[0::3], shuffled[1::3], shuffled[2::3]], 1, {}),
        ("workers", [shuffled[0::2], [], shuffled[1::2]], 2, {"ranges": 3}),
        ("little", [shuffled[0::2], shuffled[1::2]], 1, {"memory_gb": 1e-6, "ranges": 2}),
    ):
        found, figures = run(tmp_path / name, shards, workers, DedupSettings.model_validate(more))
        for size in ("CHUNK", "_BATCH"):  # from the second run on, a shard has several chunks
            monkeypatch.setattr(signatures, size, 8)
        assert {d["id"]: d.get("survivor", d["id"]) for d in found} == expected, name
        near = near or figures["near"]
        assert figures["near"] == near and len(near) == 10
    texts = {d["id"]: d["text"] for d in documents}
    for one in (one for one in found if "survivor" in one):
        equal = texts[one["id"]].lower() == texts[one["survivor"]].lower()
        assert one["reason"] == ("exact" if equal else "near")
    for dropped, survivor in near:  # as the report shows them side by side
        assert expected[dropped["id"]] == survivor["id"] and dropped["text"] != survivor["text"]
        pair = (set_of(texts[each["id"]]) for each in (dropped, survivor))
        assert dropped["similarity"] == round(jaccard(*pair), 4)
        assert dropped["text"] in texts[dropped["id"]] and survivor["text"] in texts[survivor["id"]]


def test_bytes_do_not_depend_on_workers_or_pythons_hash_seed(tmp_path: Path) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", planted(3))
    command = [sys.executable, "-m", "corpus.dedup", "run", "--input", source, "--workers", "2", "--output-dir"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    subprocess.run([*command, tmp_path / "1"], check=True, cwd=ROOT, env=environment, capture_output=True)
    dedup([source], tmp_path / "2", RULES)
    for name in ("in.jsonl.zst", "removed/in.jsonl.zst"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_the_threshold_decides(tmp_path: Path) -> None:
    text = prose(3)
    other = edited(text, 0.04, 1)
    similarity = jaccard(set_of(text), set_of(other))
    assert 0.6 < similarity < 0.95
    documents = [document(1, text), document(2, other)]
    for threshold, removed in ((similarity, 1), (float(np.nextafter(similarity, 1)), 0)):
        survivor = survivor_ids(tmp_path / str(removed), [documents], rules=DedupSettings(threshold=threshold))
        assert sum(name != best for name, best in survivor.items()) == removed


def test_pairs_at_the_threshold_are_found_as_often_as_the_banding_promises(tmp_path: Path) -> None:
    """20 bands x 6 rows find 0.998 of the pairs at Jaccard 0.8: of 100 planted ones at 0.8 or more,
    99.
    """
    documents, expected = [], 0
    for number in range(120):
        text = prose(number, 120)
        other = edited(text, 0.015, number)
        documents += [document(2 * number, text), document(2 * number + 1, other)]
        expected += jaccard(set_of(text), set_of(other)) >= 0.8
    survivor = survivor_ids(tmp_path, [documents])
    assert expected >= 90
    assert sum(name != best for name, best in survivor.items()) >= 0.99 * expected


def test_a_threshold_that_the_bands_do_not_fit_is_named_with_bands_and_rows_that_do() -> None:
    assert not RULES.low_recall()
    for threshold in (0.3, 0.5, 0.6):
        found = re.search(r"find (\d+)% .* dedup.bands=(\d+) dedup.rows=(\d+) find", message(threshold))
        assert found is not None
        recall, bands, rows = map(int, found.groups())
        assert recall == round(100 * (1 - (1 - threshold**6) ** 20)) < 90
        assert bands * rows <= 120 and not message(threshold, bands, rows)
        assert message(threshold, bands - 1, rows), "no band more than needed"
        assert message(threshold, 120 // (rows + 1), rows + 1), "fewer rows than needed propose more pairs"
    assert "bands=22 dedup.rows=1 find 90%" in message(0.1, 5, 2), "more hashes where these cannot be enough"


def message(threshold: float, bands: int = 20, rows: int = 6) -> str:
    return DedupSettings(threshold=threshold, bands=bands, rows=rows).low_recall()
