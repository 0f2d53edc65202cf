"""What a plan leaves behind: the JSON document with everything, and the YAML keys of a layout."""

from collections.abc import Sequence
from typing import Any

import yaml

from common.settings import ParallelSettings
from training.planning.explain import Symbols, symbols, time_symbols
from training.planning.layout import Layout
from training.planning.search import Prediction, Question
from training.planning.table import hours_for
from training.planning.terms import by_part


def config_keys(layout: Layout) -> dict[str, Any]:
    """The keys `parallel` and `train` of a layout, defaults too, so that they replace those of another layout."""
    keys = layout.keys()
    parallel = ParallelSettings.model_validate(keys["parallel"])
    return {
        "parallel": parallel.model_dump(mode="json"),
        "train": {**keys["train"], "accumulation": layout.accumulation},
    }


def config_text(name: str, layout: Layout) -> str:
    """A layout as the YAML of a configuration, to be merged into one: `snakemake --configfile BASE FILE`."""
    return yaml.safe_dump({"models": {name: config_keys(layout)}}, sort_keys=False)


def plan_document(
    name: str, question: Question, predictions: Sequence[Prediction], fitting: int, tokens: float, reason: str
) -> dict[str, Any]:
    """The whole answer as plain data; bytes, seconds and shares as they are. `fitting` layouts fit in all."""
    workload, machine = predictions[0].workload, predictions[0].machine
    return {
        "question": {
            "model": name,
            "gpus": question.gpus,
            "global_batch_size": question.global_batch_size,
            "at_most": question.at_most,
            "micro_batch_size": question.micro_batch_size,
            "tokens": tokens,
        },
        "model": {**workload.model.model_dump(mode="json"), "parameters": workload.model.parameters},
        "precision": workload.precision,
        "machine": {
            "name": machine.name,
            "memory_bytes": machine.memory,
            "gpus_per_node": machine.per_node,
            "gpu": machine.gpu.model_dump(mode="json"),
        },
        "fitting": fitting,
        "why": reason,
        "layouts": [_layout(number, prediction, tokens) for number, prediction in enumerate(predictions, 1)],
    }


def _layout(number: int, prediction: Prediction, tokens: float) -> dict[str, Any]:
    timed, hours = prediction.machine.timed, hours_for(prediction, tokens)
    return {
        "rank": number,
        "verdict": prediction.verdict,
        "layout": {
            **prediction.layout._asdict(),
            "world_size": prediction.layout.world_size,
            "global_batch_size": prediction.layout.global_batch_size,
        },
        "memory_bytes": prediction.memory_bytes,
        "headroom_bytes": prediction.machine.memory - prediction.memory_bytes,
        "memory_by_part": by_part(prediction.memory),
        "step_seconds": prediction.step_seconds if timed else None,
        "tokens_per_second": prediction.tokens_per_second if timed else None,
        "mfu": prediction.mfu if timed else None,
        "uncalibrated": prediction.uncalibrated,
        "bubble_share": prediction.bubble_share,
        "bytes_per_step": prediction.links._asdict(),
        "hours": hours if timed else None,
        "gpu_hours": hours * prediction.layout.world_size if timed else None,
        "terms": {
            "memory": [term._asdict() for term in prediction.memory],
            "time": [term._asdict() for term in prediction.time] if timed else [],
        },
        "symbols": {
            "all": _values(symbols(prediction.workload, prediction.layout)),
            "time": _values(time_symbols(prediction)),
        },
    }


def _values(found: Symbols) -> dict[str, float]:
    return {name: value for name, (value, _) in found.items()}
