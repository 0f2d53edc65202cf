from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InputError
from common.settings import DedupSettings
from corpus.dedup.pairs import columns_of, exact_pairs, near_pairs, read_pairs, write_pairs
from corpus.dedup.signatures import Signatures, write_signatures
from tests.helpers import document, prose, write_shard

U64 = st.integers(0, 3)


@given(st.lists(st.tuples(U64, U64, st.integers(0, 2**64 - 1)), unique_by=lambda row: row[2]))
def test_every_group_is_joined_by_a_linear_number_of_pairs(rows: list[tuple[int, int, int]]) -> None:
    hashes, exact, key = (np.array([row[column] for row in rows], dtype=np.uint64) for column in range(3))
    numbers = np.arange(len(rows)) * 10
    for pairs, groups in (
        (exact_pairs(hashes, key, numbers), {(row[0],) for row in rows}),
        (near_pairs(hashes, exact, key, numbers), {row[:1] for row in rows}),
    ):
        assert len(pairs) <= 2 * len(rows) and (pairs[:, 0] < pairs[:, 1]).all()
        for first, second in pairs.tolist():
            assert hashes[first // 10] == hashes[second // 10]
        joined = {row: row for row in numbers.tolist()}
        for first, second in pairs.tolist():
            joined = {row: joined[first] if root == joined[second] else root for row, root in joined.items()}
        assert len(groups) <= len(set(joined.values()))
    near = near_pairs(hashes, exact, key, numbers)
    for value in range(4):  # of those with equal text, one is paired with the other texts
        texts = {int(exact[row]) for row in range(len(rows)) if hashes[row] == value}
        mates = {row for pair in near.tolist() for row in pair if hashes[row // 10] == value}
        assert len(mates) == (len(texts) if len(texts) > 1 else 0)


@pytest.fixture
def signatures(tmp_path: Path) -> list[Path]:
    texts = [prose(number % 40, 60) + f" {number % 7}" for number in range(200)]
    paths = []
    for shard in range(3):
        documents = [document(number, text) for number, text in enumerate(texts) if number % 3 == shard]
        source = write_shard(tmp_path / f"{shard}.jsonl.zst", documents)
        paths.append(tmp_path / f"{shard}.signatures")
        write_signatures(source, paths[-1], DedupSettings())
    return paths


def pairs_of(signatures: list[Path], folder: Path, parts: int, settings: DedupSettings) -> set[tuple[int, ...]]:
    with Signatures(signatures, settings) as opened:
        for part in range(parts):
            write_pairs(opened, folder / f"{part}.pairs", settings, part, parts)
        files = [folder / f"{part}.pairs" for part in range(parts)]
        found = [tuple(pair) for block in range(parts) for pair in read_pairs(files, opened, "near", block).tolist()]
    assert len(found) == len(set(found)), "a pair is in one block, once"
    return set(found)


def test_pairs_do_not_depend_on_jobs_or_memory(tmp_path: Path, signatures: list[Path]) -> None:
    expected = pairs_of(signatures, tmp_path / "one", 1, DedupSettings())
    assert len(expected) > 100
    assert pairs_of(signatures, tmp_path / "many", 5, DedupSettings()) == expected
    little = DedupSettings(memory_gb=1e-5)  # 10 kB: five parts of the range of hashes
    assert pairs_of(signatures, tmp_path / "little", 2, little) == expected


def test_files_of_another_run_are_refused(tmp_path: Path, signatures: list[Path]) -> None:
    pairs_of(signatures, tmp_path, 1, DedupSettings())
    with Signatures(signatures[:2], DedupSettings()) as opened:
        with pytest.raises(InputError, match=r"0\.pairs: made from other signatures"):
            read_pairs([tmp_path / "0.pairs"], opened, "near", 0)
    with pytest.raises(InputError, match=r"0\.signatures: made with other settings"):
        Signatures(signatures, DedupSettings(seed=2))


def test_every_column_is_looked_at_by_one_job() -> None:
    for parts in (1, 3, 30):
        columns = [name for part in range(parts) for name in columns_of(part, parts, 20)]
        assert sorted(columns) == sorted(["exact", *(f"band{band}" for band in range(20))])
