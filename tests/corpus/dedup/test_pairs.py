from pathlib import Path

import pytest

from common.errors import InputError
from common.settings import DedupSettings
from corpus.dedup.pairs import read_pairs, write_pairs
from corpus.dedup.segments import Segments
from corpus.dedup.signatures import Signatures, write_signatures
from tests.helpers import document, prose, write_shard


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


def test_files_of_another_run_are_refused(tmp_path: Path, signatures: list[Path]) -> None:
    pairs_of(signatures, tmp_path, 1, DedupSettings())
    with Signatures(signatures[:2], DedupSettings()) as opened:
        with pytest.raises(InputError, match=r"0\.pairs"):
            read_pairs([tmp_path / "0.pairs"], opened, "near", 0)
    with pytest.raises(InputError, match=r"0\.signatures"):
        Signatures(signatures, DedupSettings(seed=2))


def test_a_file_cut_short_or_changed_anywhere_is_an_error_that_names_it(tmp_path: Path, signatures: list[Path]) -> None:
    pairs_of(signatures[:1], tmp_path, 1, DedupSettings())
    path = tmp_path / "0.pairs"
    whole = path.read_bytes()
    for place in range(0, len(whole), 1 + len(whole) // 200):
        for changed in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            path.write_bytes(changed)
            with pytest.raises(InputError, match=r"0\.pairs: "), Segments(path) as file:
                for name in ("near", "exact"):
                    file.read(f"{name}0", "<i8")
