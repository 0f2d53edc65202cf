from pathlib import Path

import pytest

from benchmarks.data import write_dataset
from corpus.index import IndexedDataset
from tests.conftest import Command


def test_the_dataset_of_the_benchmark_is_a_dataset(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", 1000)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.n_documents == 1000 and dataset.lengths.min() >= 128
    assert (tmp_path / "a.bin").stat().st_blocks * 512 < 1 << 16  # sparse


@pytest.mark.slow
def test_the_benchmark_runs(command: Command) -> None:
    result = command("benchmarks.training", "data", "--documents", 20_000, "--rounds", 1, "--file", 10)
    assert result.returncode == 0, result.stderr
    assert "| training.dataset " in result.stdout and "| training.dataset, 2 threads | warm" in result.stdout
