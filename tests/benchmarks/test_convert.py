"""The benchmark of merging runs, and the memory is within the bound that it prints."""

import pytest

from tests.conftest import Command


@pytest.mark.slow
def test_the_benchmark_runs(command: Command) -> None:
    result = command("benchmarks.training", "convert", "--size", "tiny", "--rounds", 1)
    assert result.returncode == 0, result.stderr
    rows = [line.split("|") for line in result.stdout.splitlines() if ": written" in line or ": convert.merge" in line]
    assert [row[1].strip() for row in rows] == [
        "Megatron-LM, tensor 8: written",
        "Megatron-LM, tensor 8: convert.merge_mp",
        "ours: written",
        "ours: convert.merge_mp",
    ]
    for row in rows:
        memory, bound = (int(cell.strip().replace(",", "")) for cell in row[6:8])
        assert memory < bound
