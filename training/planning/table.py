"""Predictions for people and programs: tables, JSON and YAML."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from common.console import readable_bytes, text_table
from common.settings import GpuSettings
from training.planning.layout import Layout, PlanRequest, Term, by_part
from training.planning.machines import GIB
from training.planning.memory import PARTS
from training.planning.search import Prediction

_HEADS = {"logits and loss": "loss", "communication": "buffers", "parameters": "params", "gradients": "grads"}


def layout_table(predictions: Sequence[Prediction], tokens: float) -> str:
    """One line per prediction: layout, speed, bytes sent per GPU and step, time for `tokens`."""
    head = ("", "tp", "pp", "dp", "ZeRO", "batch", "recompute")
    speed = ("tokens/s", "MFU", "idle", "in node", "between", "hours", "GPU-hours")
    rows: list[tuple[str, ...]] = [(*head, *speed)]
    for number, prediction in enumerate(predictions, 1):
        layout, hours = prediction.layout, hours_for(prediction, tokens)
        times = (f"{float(f'{prediction.tokens_per_second:.4g}'):,.0f}", f"{prediction.mfu:.1%}")
        lengths = (_hours(hours), _hours(hours * layout.world_size))
        if not prediction.machine.timed:
            times = lengths = ("-", "-")
        rows.append(
            (
                str(number),
                f"{layout.tensor}{' sp' * layout.sequence_parallel}",
                f"{layout.pipeline}{f' x {layout.virtual_stages}' if layout.virtual_stages > 1 else ''}",
                str(layout.data),
                f"{layout.zero_stage if layout.data > 1 else '-'}{' offload' * layout.offload}",
                f"{layout.micro_batch_size} x {layout.accumulation}",  # `batch`
                layout.recompute,
                *times,
                f"{prediction.bubble_share:.1%}",
                *map(readable_bytes, prediction.links),
                *lengths,
            )
        )
    return text_table(rows, "r" + "l" * (len(head) - 1) + "r" * len(speed))


def fact_table(name: str, request: PlanRequest, best: Prediction, tokens: float) -> str:
    """The model, machine, batch and run."""
    model, machine = best.workload.model, best.machine
    rows = {
        "model": f"{name}: {model.n_layer} layers, {model.n_embd} wide, {model.n_head} heads, "
        f"sequence {model.seq_len}; {model.parameters:,} parameters; {best.workload.precision}",
        "CPUs" if machine.device == "cpu" else "GPUs": f"{request.gpus} x {machine.name} with "
        f"{machine.memory / GIB:.1f} GiB, {min(machine.per_node, request.gpus)} per node",
        "step": f"{request.global_batch_size:,} samples",
        "run": f"{tokens / 1e9:,.1f} B tokens" if tokens >= 1e9 else f"{tokens:,.0f} tokens",
    }
    if not machine.timed:
        rows["speed"] = "not predicted on CPUs; cluster.autotune measures it"
    if best.layout.offload:
        host = 16 * model.parameters / best.layout.world_size  # weight, gradient, two moments
        rows["offload"] = f"each GPU needs {host / GIB:,.1f} GiB of CPU memory"
    return text_table(rows.items())


def memory_table(predictions: Sequence[Prediction]) -> str:
    """One line per prediction: GiB on the fullest GPU, by part, and whether they fit."""
    rows: list[tuple[str, ...]] = [
        ("", "verdict", *(_HEADS.get(part, part) for part in PARTS), "GiB per GPU", "headroom", "share")
    ]
    for number, prediction in enumerate(predictions, 1):
        parts, memory = by_part(prediction.memory), prediction.machine.memory
        sizes = [*(parts.get(part, 0) for part in PARTS), prediction.memory_bytes, memory - prediction.memory_bytes]
        share = f"{prediction.memory_bytes / memory:.1%}"
        rows.append((str(number), prediction.verdict, *(f"{size / GIB:.2f}" for size in sizes), share))
    return text_table(rows, "rl" + "r" * 10)


def gpu_table(kinds: Mapping[str, GpuSettings]) -> str:
    """One line per kind of GPU: memory, dense peaks, bandwidths of its memory and links."""
    rows: list[tuple[str, ...]] = [
        ("kind", "GiB", "bfloat16", "float16", "float32", "memory", "in node", "network", "per node"),
        ("", "", "TFLOP/s", "TFLOP/s", "TFLOP/s", "GB/s", "GB/s", "GB/s", ""),
    ]
    for name, gpu in kinds.items():
        peaks = (gpu.bfloat16_tflops, gpu.float16_tflops or gpu.bfloat16_tflops, gpu.float32_tflops)
        rates = (gpu.memory_gb_per_s, gpu.node_gb_per_s, gpu.network_gb_per_s, gpu.gpus_per_node)
        rows.append((name, *(f"{value:g}" if value else "-" for value in (gpu.memory_gib, *peaks, *rates))))
    return text_table(rows, "l" + "r" * 8)


def explain(prediction: Prediction) -> str:
    """The terms of the memory and of a step's time; docs/planning_model.md has their formulas."""
    machine = prediction.machine
    memory = f"Memory of the fullest GPU: {prediction.memory_bytes / GIB:.2f} of {machine.memory / GIB:.2f} GiB"
    sections = [f"{memory}\n{_terms(prediction.memory, GIB)}"]
    if machine.timed:
        sections.append(f"A step: {1e3 * prediction.step_seconds:,.1f} ms\n{_terms(prediction.time, 1e-3)}")
    return "\n\n".join(sections)


def _terms(terms: Sequence[Term], unit: float) -> str:
    parts = list(by_part(terms))
    ordered = sorted(terms, key=lambda term: parts.index(term.part))
    return text_table([(term.part, f"{term.value / unit:,.3f}", term.name) for term in ordered], "lr")


def hours_for(prediction: Prediction, tokens: float) -> float:
    """Hours of training for `tokens`."""
    return tokens / prediction.tokens_per_second / 3600


def _hours(hours: float) -> str:
    """With one decimal below 1,000, and two digits below 1."""
    return f"{hours:.2g}" if hours < 1 else f"{hours:,.1f}" if hours < 1000 else f"{hours:,.0f}"


def config_text(name: str, layout: Layout) -> str:
    """A layout as YAML, to be merged into a configuration: `snakemake --configfile BASE FILE`."""
    return yaml.safe_dump({"models": {name: layout.keys()}}, sort_keys=False)


def plan_document(
    name: str, request: PlanRequest, predictions: Sequence[Prediction], fitting: int, tokens: float
) -> dict[str, Any]:
    """The whole plan as plain data, numbers not rounded; `fitting`: how many layouts fit."""
    workload, machine = predictions[0].workload, predictions[0].machine
    return {
        "request": {"model": name, **vars(request), "tokens": tokens},
        "model": {**workload.model.model_dump(mode="json"), "parameters": workload.model.parameters},
        "precision": workload.precision,
        "machine": {
            "name": machine.name,
            "memory_bytes": machine.memory,
            "gpus_per_node": machine.per_node,
            "gpu": machine.gpu.model_dump(mode="json"),
        },
        "fitting": fitting,
        "layouts": [{"rank": rank, **_document(one, tokens)} for rank, one in enumerate(predictions, 1)],
    }


def _document(prediction: Prediction, tokens: float) -> dict[str, Any]:
    layout, hours = prediction.layout, hours_for(prediction, tokens)
    times: dict[str, Any] = {
        "step_seconds": prediction.step_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "hours": hours,
        "gpu_hours": hours * layout.world_size,
    }
    timed = prediction.machine.timed
    terms = {"memory": prediction.memory, "time": prediction.time if timed else []}
    return {
        "verdict": prediction.verdict,
        "layout": {
            **layout._asdict(), "world_size": layout.world_size, "global_batch_size": layout.global_batch_size
        },
        "memory_bytes": prediction.memory_bytes,
        "headroom_bytes": prediction.machine.memory - prediction.memory_bytes,
        "memory_by_part": by_part(prediction.memory),
        **(times if timed else dict.fromkeys(times)),
        "bubble_share": prediction.bubble_share,
        "bytes_per_step": dict(zip(("in_node", "between_nodes"), prediction.links, strict=True)),
        "terms": {part: [term._asdict() for term in each] for part, each in terms.items()},
    }  # fmt: skip
