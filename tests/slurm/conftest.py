"""A cluster of two nodes for the tests of a file."""

from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab, missing, slurm


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes without GPUs and accounting; skips the test where Slurm is absent."""
    if reason := missing():
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("lab")) as running:
        yield running
