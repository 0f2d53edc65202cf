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
        "Symbols\n" + text_table([(name, f"{value:,}", meaning) for name, (value, meaning) in values], "lr")
    )
    if sources:
        sections.append("Sources\n" + "\n".join(f"[{number}] {source}" for source, number in sources.items()))
    return "\n\n".join(sections)


def _terms(title: str, terms: list[Term], unit: float, name: str, sources: dict[str, int]) -> str:
    """A section: the parts, and below each its terms that are not zero. Numbers the sources in `sources`."""
    parts = {part: value for part, value in by_part(terms).items() if value}
    of_parts = [[term for term in terms if term.part == part and term.value] for part in parts]
    rows = []
    for term in (term for of_part in of_parts for term in of_part):
        note = f" [{sources.setdefault(term.source, len(sources) + 1)}]" if term.source else ""
        rows.append((f"{term.value / unit:,.3f}", term.name, f"{term.formula}{note}"))
    table = iter(text_table(rows, "r").splitlines())  # one table, so that the columns of all parts are aligned
    lines = [title]
    for (part, value), of_part in zip(parts.items(), of_parts, strict=True):
        lines += [f"{part}: {value / unit:,.3f} {name}", *(f"  {next(table)}" for _ in of_part)]
    return "\n".join(lines)
