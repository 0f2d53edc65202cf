from tests.conftest import Command


def test_the_benchmark_runs(command: Command) -> None:
    result = command("benchmarks.training", "checkpoint", "--size", "tiny", "--rounds", 1)
    assert result.returncode == 0, result.stderr
    for row in ("| save: copy of the files ", "| save: ours, with hashes and manifest ", "| load: ours, verified "):
        assert row in result.stdout
    assert "| train.async_save " in result.stdout
