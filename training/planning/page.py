"""The page a person looks at: memory by part for the best layouts, and the roofline of the first."""

from collections.abc import Iterable, Sequence

from common.page import render
from training.planning.charts import memory_chart, roofline_chart
from training.planning.machines import GIB
from training.planning.memory import PARTS
from training.planning.roofline import work_of
from training.planning.search import Prediction
from training.planning.table import hours_for, hours_text, short
from training.planning.terms import by_part


def plan_page(
    title: str, facts: Iterable[tuple[str, str]], predictions: Sequence[Prediction], tokens: float, reason: str
) -> str:
    """One HTML document. `facts` are the lines above the figures, `reason` says why the first layout is the best."""
    best = predictions[0]
    rows = [
        {
            "layout": short(prediction.layout),
            "verdict": prediction.verdict,
            "speed": f"{prediction.tokens_per_second:,.0f}" if prediction.machine.timed else "-",
            "mfu": f"{prediction.mfu:.1%}" if prediction.machine.timed else "-",
            "hours": hours_text(hours_for(prediction, tokens)) if prediction.machine.timed else "-",
            "parts": [f"{by_part(prediction.memory).get(part, 0) / GIB:.2f}" for part in PARTS],
            "memory": f"{prediction.memory_bytes / GIB:.2f}",
            "share": f"{prediction.memory_bytes / prediction.machine.memory:.0%}",
        }
        for prediction in predictions
    ]
    works = [
        {
            "name": work.name,
            "intensity": f"{work.intensity:,.1f}",
            "reached": f"{work.attainable(best.machine, best.workload.precision) / 1e12:,.1f}",
        }
        for work in work_of(best.workload, best.layout)
    ]
    return render(
        "training.planning",
        "page.html",
        title=title,
        facts=list(facts),
        reason=reason,
        parts=PARTS,
        rows=rows,
        works=works,
        memory_chart=memory_chart(predictions),
        roofline_chart=roofline_chart(best),
    )
