"""Predictions as text: two tables of at most 120 columns, and why the first layout is the best."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from common.settings import GpuSettings
from common.tables import text_table
from training.planning.layout import Layout
from training.planning.machines import GIB
from training.planning.memory import PARTS
from training.planning.search import Prediction
from training.planning.terms import by_part

_HEADS = {"logits and loss": "loss", "communication": "buffers", "parameters": "params", "gradients": "grads"}


def layout_table(predictions: Sequence[Prediction], tokens: float) -> str:
    """One line per prediction: the layout, its speed, what a GPU sends per step, and the time for `tokens`.

    `batch` is micro_batch_size x accumulation; `samples`, of a step, is only shown if it is not the same everywhere.
    """
    differ = len({prediction.layout.global_batch_size for prediction in predictions}) > 1
    head = ("", "tp", "pp", "dp", "ZeRO", "batch", *["samples"] * differ, "recompute")
    speed = ("tokens/s", "MFU", "idle", "in node", "between", "hours", "GPU-hours")
    rows: list[tuple[str, ...]] = [(*head, *speed)]
    for number, prediction in enumerate(predictions, 1):
        layout, hours = prediction.layout, hours_for(prediction, tokens)
        rows.append(
            (
                str(number),
                f"{layout.tensor}{' sp' * layout.sequence_parallel}",
                f"{layout.pipeline}{f' x {layout.virtual_stages}' if layout.virtual_stages > 1 else ''}",
                str(layout.data),
                f"{layout.zero_stage if layout.data > 1 else '-'}{' offload' * layout.offload}",
                f"{layout.micro_batch_size} x {layout.accumulation}",
                *[str(layout.global_batch_size)] * differ,
                layout.recompute,
                *_if_timed(prediction, f"{float(f'{prediction.tokens_per_second:.4g}'):,.0f}", f"{prediction.mfu:.1%}"),
                f"{prediction.bubble_share:.1%}",
                size(prediction.links.in_node),
                size(prediction.links.between_nodes),
                *_if_timed(prediction, hours_text(hours), hours_text(hours * layout.world_size)),
            )
        )
    return text_table(rows, "r" + "l" * (len(head) - 1) + "r" * len(speed))


def _if_timed(prediction: Prediction, *cells: str) -> tuple[str, ...]:
    return cells if prediction.machine.timed else ("-",) * len(cells)


def trust(prediction: Prediction) -> list[tuple[str, str]]:
    """A line on a speed that is not predicted, or not to be trusted."""
    if not prediction.machine.timed:
        return [("speed", "not predicted on CPUs; --probe measures it")]
    return [("speed", f"uncalibrated: {why}") for why in [prediction.uncalibrated] if why]


def memory_table(predictions: Sequence[Prediction]) -> str:
    """One line per prediction: GiB on the fullest GPU, by part, and whether they fit."""
    rows: list[tuple[str, ...]] = [
        ("", "verdict", *(_HEADS.get(part, part) for part in PARTS), "GiB per GPU", "headroom", "share")
    ]
    for number, prediction in enumerate(predictions, 1):
        parts, memory = by_part(prediction.memory), prediction.machine.memory
        rows.append(
            (
                str(number),
                prediction.verdict,
                *(f"{parts.get(part, 0) / GIB:.2f}" for part in PARTS),
                f"{prediction.memory_bytes / GIB:.2f}",
                f"{(memory - prediction.memory_bytes) / GIB:.2f}",
                f"{prediction.memory_bytes / memory:.1%}",
            )
        )
    return text_table(rows, "rl" + "r" * 10)


def gpu_table(kinds: Mapping[str, GpuSettings]) -> str:
    """One line per kind of GPU: memory, dense peaks in TFLOP/s, bandwidths of its memory and links in GB/s."""
    rows: list[tuple[str, ...]] = [
        ("kind", "GiB", "bfloat16", "float16", "float32", "memory", "in node", "network", "per node"),
        ("", "", "TFLOP/s", "TFLOP/s", "TFLOP/s", "GB/s", "GB/s", "GB/s", ""),
    ]
    for name, gpu in kinds.items():
        peaks = (gpu.bfloat16_tflops, gpu.float16_tflops or gpu.bfloat16_tflops, gpu.float32_tflops)
        rates = (gpu.memory_gb_per_s, gpu.node_gb_per_s, gpu.network_gb_per_s, gpu.gpus_per_node)
        rows.append((name, *(f"{value:g}" if value else "-" for value in (gpu.memory_gib, *peaks, *rates))))
    return text_table(rows, "l" + "r" * 8)


def hours_text(hours: float) -> str:
    """With one decimal below 1,000, and two digits below 1."""
    return f"{hours:.2g}" if hours < 1 else f"{hours:,.1f}" if hours < 1000 else f"{hours:,.0f}"


def hours_for(prediction: Prediction, tokens: float) -> float:
    """Hours of training for so many tokens."""
    return tokens / prediction.tokens_per_second / 3600


def size(count: float) -> str:
    """Bytes with a decimal unit, as links are measured: `12.3 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:,.0f} {unit}"
    return f"{count:.0f} B"


def short(layout: Layout) -> str:
    """`tp 8, pp 4 x 2, dp 8, ZeRO 1, batch 1 x 64, full recompute`; what is off is left out."""
    parts = [
        f"tp {layout.tensor}" if layout.tensor > 1 else "",
        f"pp {layout.pipeline}{f' x {layout.virtual_stages}' * (layout.virtual_stages > 1)}"
        if layout.pipeline > 1
        else "",
        f"dp {layout.data}" if layout.data > 1 else "",
        f"ZeRO {layout.zero_stage}" if layout.zero_stage else "",
        "offload" if layout.offload else "",
        f"batch {layout.micro_batch_size} x {layout.accumulation}",
        f"{layout.recompute} recompute" if layout.recompute != "none" else "",
    ]
    return ", ".join(filter(None, parts))


def why(ranked: Sequence[Prediction]) -> str:
    """One sentence on the first of all layouts that fit: what it does without, and what each measure gains."""
    best = ranked[0]
    layout = best.layout
    measures: list[tuple[str, bool, Callable[[Layout], bool]]] = [
        ("recompute", layout.recompute != "none", lambda other: other.recompute == "none"),
        ("tensor parallelism", layout.tensor > 1, lambda other: other.tensor == 1),
        ("a pipeline", layout.pipeline > 1, lambda other: other.pipeline == 1),
        ("offload", layout.offload, lambda other: not other.offload),
        (f"ZeRO {layout.zero_stage}", layout.zero_stage > 0, lambda other: other.zero_stage == 0),
    ]
    avoided = [name for name, used, _ in measures if not used and name not in ("offload", "ZeRO 0")]
    verdict = "Fits" if best.verdict == "feasible" else "Fits tightly"
    parts = [f"{verdict} without {_or(avoided)}" if avoided else verdict]
    for name, used, without in measures:
        if used:
            others = (other for other in ranked if without(other.layout))
            other = next(others, None)
            parts.append(
                _gain(best, name, other) if other is None or best.machine.timed else f"ranked first with {name}"
            )
    if layout.zero_stage:
        parts[-1] += f": it shards {_SHARDED[layout.zero_stage]} over {layout.data} ranks"
    if layout.offload:
        host = 16 * best.workload.model.parameters / layout.world_size / GIB  # parameter, gradient and two moments
        parts.append(f"each GPU needs {host:,.1f} GiB of CPU memory")
    return "; ".join(parts) + "."


_SHARDED = {
    1: "the optimizer's state",
    2: "gradients and the optimizer's state",
    3: "parameters, gradients and the optimizer's state",
}


def _gain(best: Prediction, name: str, other: Prediction | None) -> str:
    """What a measure gains over the best layout without it."""
    if other is None:
        return f"nothing fits without {name}"
    if best.verdict == "feasible" != other.verdict:
        return f"without {name} the fit is tight"
    gain = best.tokens_per_second / other.tokens_per_second - 1
    if gain < 0.001:
        return f"{name} costs no speed"
    if gain < 1:
        return f"{gain:.1%} faster than the best without {name}"
    return f"{1 + gain:.1f} times as fast as the best without {name}"


def _or(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
