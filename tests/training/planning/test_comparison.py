from training.planning.comparison import Figures, goals, layout_text, readable_bytes, table
from training.planning.layout import Layout

GIB = 2**30
MEASURED = Figures(2 * GIB, 4 * GIB, 8 * GIB, 1 * GIB, 0.2, 50_000, 0.4)


def test_a_table_has_every_figure_with_its_error() -> None:
    lines = table(MEASURED._replace(step=9.5 * GIB, step_seconds=0.17), MEASURED).splitlines()
    memory = next(line for line in lines if line.startswith("memory of the fullest"))
    assert memory.split()[-6:] == ["16.50", "GiB", "15.00", "GiB", "+10.0", "%"]
    assert next(line for line in lines if line.startswith("step")).split()[1:] == "170.0 ms 200.0 ms -15.0 %".split()
    assert lines[0].split() == ["predicted", "measured", "error"] and len(lines) == 9


def test_goals_are_judged_on_gpus_only() -> None:
    close, far = MEASURED._replace(step=9.4 * GIB, step_seconds=0.171), MEASURED._replace(step=1, step_seconds=0.3)
    assert [line.rpartition(", ")[2] for line in goals(close, MEASURED, "cuda")] == ["reached", "reached"]
    assert [line.rpartition(", ")[2] for line in goals(far, MEASURED, "cuda")] == ["NOT reached", "NOT reached"]
    (line,) = goals(far, MEASURED, "cpu")
    assert line.startswith("no GPU") and "reached" not in line


def test_a_layout_is_written_without_what_it_does_not_use() -> None:
    assert layout_text(Layout(micro_batch_size=4, accumulation=2)) == "batch 4 x 2"
    layout = Layout(2, True, 4, "interleaved_1f1b", 2, 8, 1, False, 4, 16, "selective")
    assert layout_text(layout) == "tp 2 sp, pp 4 x 2, dp 8 ZeRO 1, batch 4 x 16, selective recompute"


def test_bytes_are_readable() -> None:
    assert [readable_bytes(size) for size in (14.75 * GIB, 3 << 20)] == ["14.75 GiB", "3.0 MiB"]
