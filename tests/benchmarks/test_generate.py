import pytest

from benchmarks.training import main
from tests.training.helpers import run_main


def test_the_command_prints_ours_and_transformers_which_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(main, "generate", "--tiny", "--prompt-tokens", 4, "--tokens", 6, "--rounds", 1) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    table = {row[0]: row for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])}
    assert table["transformers.generate"][3] == "1.00"
    assert table["training.generate"][1] == table["ours without a cache"][1] == "6"
    assert table["training.generate, 8 prompts"][1] == "48"
