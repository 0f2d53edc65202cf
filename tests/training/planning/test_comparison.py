from dataclasses import replace

from common.tables import readable_bytes
from training.planning.comparison import Figures, goals, table
from training.planning.machines import cpu_machine, machine

GIB = 2**30
MEASURED = Figures(2 * GIB, 4 * GIB, 8 * GIB, 1 * GIB, 0.2, 50_000, 0.4)


H100 = machine("h100", {})


def test_a_table_has_every_figure_with_its_error() -> None:
    lines = table(MEASURED._replace(transient=9.5 * GIB, step_seconds=0.17), MEASURED).splitlines()
    memory = next(line for line in lines if line.startswith("memory of the fullest"))
    assert memory.split()[-6:] == ["16.50", "GiB", "15.00", "GiB", "+10.0", "%"]
    assert next(line for line in lines if line.startswith("step")).split()[1:] == "170.0 ms 200.0 ms -15.0 %".split()
    assert lines[0].split() == ["predicted", "measured", "error"] and len(lines) == 9


def test_goals_are_judged_on_gpus_only() -> None:
    close, far = (
        MEASURED._replace(transient=9.4 * GIB, step_seconds=0.171),
        MEASURED._replace(transient=1, step_seconds=0.3),
    )
    assert [line.rpartition(", ")[2] for line in goals(close, MEASURED, H100)] == ["reached", "reached"]
    assert [line.rpartition(", ")[2] for line in goals(far, MEASURED, H100)] == ["NOT reached", "NOT reached"]
    unknown, memory = goals(far, MEASURED, replace(H100, name="unknown"))
    assert "cluster.gpus" in unknown and memory.startswith("goal: memory")
    (line,) = goals(far, MEASURED, cpu_machine(1, 1, 1))
    assert line.startswith("no GPU") and "reached" not in line


def test_bytes_are_readable() -> None:
    assert [readable_bytes(size) for size in (14.75 * GIB, 3 << 20)] == ["14.75 GiB", "3.0 MiB"]
