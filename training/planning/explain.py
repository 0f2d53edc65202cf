"""A prediction explained: every term with its formula, value and source, and the values of the symbols."""

from collections.abc import Iterable

from common.tables import text_table
from training.parallel.vocabulary import padded_vocab_size
from training.planning.layout import Layout
from training.planning.machines import GIB
from training.planning.search import Prediction
from training.planning.terms import Term, by_part
from training.planning.workload import Workload


def symbols(workload: Workload, layout: Layout) -> dict[str, tuple[float, str]]:
    """The symbols of the formulas: their values and meanings."""
    model = workload.model
    return {
        "P": (model.parameters, "parameters of the model"),
        "L": (model.n_layer, "layers"),
        "h": (model.n_embd, "width"),
        "a": (model.n_head, "attention heads"),
        "s": (model.seq_len, "tokens of a sample"),
        "V": (padded_vocab_size(model.vocab_size, layout.tensor), "rows of the vocabulary, with padding"),
        "e": (workload.element, "bytes of an activation"),
        "t": (layout.tensor, "tensor-parallel ranks"),
        "p": (layout.pipeline, "pipeline ranks"),
        "v": (layout.virtual_stages, "stages per pipeline rank"),
        "d": (layout.data, "data-parallel ranks"),
        "b": (layout.micro_batch_size, "samples of a micro-batch"),
        "m": (layout.accumulation, "micro-batches of a step"),
    }


def explain(prediction: Prediction, published: Iterable[Term] = ()) -> str:
    """The terms of the memory and of a step's time, the published estimates beside them, and the symbols."""
    sources: dict[str, int] = {}
    machine = prediction.machine
    memory = f"Memory of the fullest GPU: {prediction.memory_bytes / GIB:.2f} of {machine.memory / GIB:.2f} GiB"
    sections = [
        _terms(memory, prediction.memory, GIB, "GiB", sources),
        _terms(f"A step: {1e3 * prediction.step_seconds:,.1f} ms", prediction.time, 1e-3, "ms", sources),
    ]
    if estimates := list(published):
        sections.append(_terms("Published estimates of the memory", estimates, GIB, "GiB", sources))
    values = symbols(prediction.workload, prediction.layout).items()
    sections.append(
        "Symbols\n" + text_table([(f"  {name}", f"{value:,}", meaning) for name, (value, meaning) in values], "lr")
    )
    if sources:
        sections.append("Sources\n" + "\n".join(f"  [{number}] {source}" for source, number in sources.items()))
    return "\n\n".join(sections)


def _terms(title: str, terms: list[Term], unit: float, name: str, sources: dict[str, int]) -> str:
    """A section: each part with its terms, one line each. Numbers the sources in `sources`."""
    rows: list[tuple[str, ...]] = [("", name, "", "formula")]
    for part, sum_of_part in by_part(terms).items():
        of_part = [term for term in terms if term.part == part]
        rows.append((f"  {part}", f"{sum_of_part / unit:,.3f}", "", ""))
        for term in of_part:
            note = f" [{sources.setdefault(term.source, len(sources) + 1)}]" if term.source else ""
            rows.append(("", f"{term.value / unit:,.3f}", term.name, f"{term.formula}{note}"))
    return f"{title}\n{text_table(rows, 'lrl')}"
