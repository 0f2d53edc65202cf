"""Each package keeps its budget of lines: a change that only adds needs a reason, and a higher number here."""

from tests.conftest import ROOT

LINES = {
    "workflow": 3_900,
    "corpus": 9_100,
    "training": 12_500,
    "convert": 4_450,
    "cluster": 2_900,
    "common": 4_850,
    "benchmarks": 2_700,
    "tests": 24_540,
}


def test_no_package_is_over_its_budget_of_lines() -> None:
    for package, budget in LINES.items():
        files = [path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        assert lines <= budget, f"{package}: {lines} lines; the budget is {budget}"
