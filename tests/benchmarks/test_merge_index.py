from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks.merge_index import make_shards, measure
from corpus.index import IndexedDataset
from tests.conftest import Command


def rows(table: str) -> dict[str, list[str]]:
    lines = (line for line in table.splitlines() if line.startswith("| ") and "merging" not in line)
    cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return {f"{name}, {shards}": rest for name, shards, *rest in cells}


def test_links_stand_for_the_shards_after_the_hundredth(tmp_path: Path) -> None:
    with patch("common.files.writing.fsync"):
        prefixes = make_shards(tmp_path, 101, 3, 5)
    assert [IndexedDataset(prefix).n_documents for prefix in prefixes] == [3] * 101
    assert prefixes[100].with_suffix(".bin").samefile(prefixes[0].with_suffix(".bin"))


def test_ours_stands_beside_a_plain_copy(tmp_path: Path) -> None:
    with patch("benchmarks.merge_index.find_spec", return_value=None):
        found = rows(measure(Namespace(shards=3, large=4, documents=5, tokens=9, rounds=1, folder=tmp_path)))
    assert [(name, row[0]) for name, row in found.items()] == [
        ("plain copy of the .bin, 3", "15"),
        ("corpus.merge_index, 3", "15"),
        ("plain copy of the .bin, 4", "20"),
        ("corpus.merge_index, 4", "20"),
    ]
    assert found["plain copy of the .bin, 3"][3] == "1.000"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_names_the_builder_where_it_is_installed(tmp_path: Path, command: Command) -> None:
    if not find_spec("megatron"):
        pytest.skip("megatron-core is not installed: it is a peer, not a dependency")
    result = command("benchmarks.corpus", "merge_index", "--shards", 3, "--documents", 5, "--folder", tmp_path)
    assert result.returncode == 0, result.stderr
    assert {"megatron-core, not collecting, 3", "megatron-core, add_index, 3"} < rows(result.stdout).keys()
