"""Predicted and measured figures side by side, and whether the goals for both were reached."""

from dataclasses import replace

from training.planning.comparison import Figures, goals, table
from training.planning.machines import GIB, cpu_machine, machine

MEASURED = Figures(2 * GIB, 4 * GIB, 8 * GIB, 1 * GIB, 0.2, 50_000, 0.4)
H100 = machine("h100", {})


def test_a_table_has_every_figure_with_its_error() -> None:
    lines = table(MEASURED._replace(transient=9.5 * GIB, step_seconds=0.17), MEASURED).splitlines()
    memory = next(line for line in lines if line.startswith("memory of the fullest"))
    assert memory.split()[-6:] == ["16.50", "GiB", "15.00", "GiB", "+10.0", "%"]
    assert next(line for line in lines if line.startswith("step")).split()[1:] == "170.0 ms 200.0 ms -15.0 %".split()
    assert lines[0].split() == ["predicted", "measured", "error"] and len(lines) == 9


def test_goals_are_judged_on_known_gpus_only() -> None:
    for transient, seconds, outcome in ((9.4 * GIB, 0.171, "reached"), (1, 0.3, "NOT reached")):
        found = goals(MEASURED._replace(transient=transient, step_seconds=seconds), MEASURED, H100)
        assert [line.rpartition(", ")[2] for line in found] == [outcome, outcome]
    unknown, _memory = goals(MEASURED, MEASURED, replace(H100, name="unknown"))
    (line,) = goals(MEASURED, MEASURED, cpu_machine(1, 1, 1))
    assert "cluster.gpus" in unknown and "reached" not in line
