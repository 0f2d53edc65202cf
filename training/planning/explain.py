"""A prediction explained: every term with its formula, value and source, and the values of the symbols."""

from common.tables import text_table
from training.parallel.vocabulary import padded_vocab_size
from training.planning.layout import Layout
from training.planning.machines import GIB
from training.planning.moments import in_flight
from training.planning.published import published_terms
from training.planning.rates import rates_of
from training.planning.search import Prediction
from training.planning.terms import Term, by_part
from training.planning.traffic import parameters, ranks, traffic
from training.planning.workload import Workload

Symbols = dict[str, tuple[float, str]]
"""The symbols of formulas: their values and meanings."""


def symbols(workload: Workload, layout: Layout) -> Symbols:
    """The symbols of all formulas."""
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
        "u": (workload.element * layout.micro_batch_size * model.seq_len * model.n_embd, "bytes: e b s h"),
        "q": (1 / layout.tensor if layout.sequence_parallel else 1, "1 / t with sequence parallelism, else 1"),
        "k": (in_flight(layout, 0), "micro-batches in flight on the first pipeline rank"),
    }


def time_symbols(prediction: Prediction) -> Symbols:
    """The symbols of the formulas of time, beside those of all: the busiest pipeline rank, and rates."""
    workload, layout, machine = prediction.workload, prediction.layout, prediction.machine
    first, last = ranks(workload.model.n_layer, layout)
    rank = first if first.layers > last.layers else last
    sent, rates, gpu = traffic(workload, layout, machine, rank), rates_of(machine), machine.gpu
    groups = {"tensor": sent.tensor_ranks, "pipeline": sent.pipeline_ranks, "data": sent.data_ranks}
    return {
        "l": (rank.layers, "layers of the pipeline rank"),
        "n": (round(parameters(workload, layout, rank)[0]), "parameters of the GPU, before ZeRO shards them"),
        "R": (rates.products * machine.peak_flops(workload.precision) / 1e12, "TFLOP/s of matrix products"),
        "F": (gpu.float32_tflops, "TFLOP/s of other operations, float32"),
        "W": (rates.bandwidth * gpu.memory_gb_per_s, "GB/s of memory"),
        **{
            f"N {name}": (
                group.bandwidth / 1e9,
                f"GB/s between {name}-parallel ranks{' on several nodes' * group.crosses}",
            )
            for name, group in groups.items()
            if group.size > 1
        },
    }


def explain(prediction: Prediction) -> str:
    """The terms of the memory and of a step's time, the published estimates beside them, and the symbols."""
    sources: dict[str, int] = {}
    machine = prediction.machine
    memory = f"Memory of the fullest GPU: {prediction.memory_bytes / GIB:.2f} of {machine.memory / GIB:.2f} GiB"
    sections = [
        _terms(memory, prediction.memory, GIB, "GiB", sources),
    ]
    if machine.timed:
        step = f"A step: {1e3 * prediction.step_seconds:,.1f} ms"
        sections.append(_terms(step, prediction.time, 1e-3, "ms", sources))
    if machine.device == "cuda":
        estimates = published_terms(prediction.workload, prediction.layout)
        sections.append(_terms("Published estimates of the memory", estimates, GIB, "GiB", sources))
    sections.append(_legend("Symbols", symbols(prediction.workload, prediction.layout)))
    sections.append(_legend("Symbols of the time", time_symbols(prediction)))
    if sources:
        sections.append("Sources\n" + "\n".join(f"[{number}] {source}" for source, number in sources.items()))
    return "\n\n".join(sections)


def _legend(title: str, values: Symbols) -> str:
    rows = [
        (name, f"{value:,.6g}" if isinstance(value, float) else f"{value:,}", text)
        for name, (value, text) in values.items()
    ]
    return f"{title}\n{text_table(rows, 'lr')}"


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
