from importlib.util import find_spec
from pathlib import Path

from benchmarks.merge_index import make_shards
from corpus.index import IndexedDataset
from tests.conftest import Command


def test_links_stand_for_the_shards_after_the_hundredth(tmp_path: Path) -> None:
    prefixes = make_shards(tmp_path, 101, 3, 5)
    assert [IndexedDataset(prefix).n_documents for prefix in prefixes] == [3] * 101
    assert prefixes[100].with_suffix(".bin").samefile(prefixes[0].with_suffix(".bin"))


def test_the_table_names_the_peers(tmp_path: Path, command: Command) -> None:
    result = command("benchmarks.corpus", "merge_index", "--shards", 3, "--documents", 5, "--folder", tmp_path)
    assert result.returncode == 0, result.stderr
    rows = {line.split("|")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("| ")}
    assert "15" in rows["corpus.merge_index"] and "1.000" in rows["plain copy of the .bin"]
    assert ("megatron-core, add_index" in rows) == bool(find_spec("megatron"))
    assert not list(tmp_path.iterdir())
