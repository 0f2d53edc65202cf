from tests.conftest import Command


def test_the_table_names_peers_and_what_was_found(command: Command) -> None:
    result = command("benchmarks.corpus", "dedup", "--count", 60, "--rounds", 1)
    assert result.returncode == 0, result.stderr
    assert "corpus.dedup run, verified" in result.stdout and "datasketch MinHashLSH" in result.stdout
    assert "pairs at Jaccard >= 0.8" in result.stdout and "1.0000" in result.stdout
