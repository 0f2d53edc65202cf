"""Cases of the planner's checks, and their predictions; as a command, the table of docs/planning.md.

python -m tests.training.planning.cases
"""

import sys
from typing import Any

from common.settings import Experiment
from tests.training.planning.simulated_step import simulated
from training.planning.layout import Layout
from training.planning.machines import Machine, known_gpus
from training.planning.memory import rank_terms, total
from training.planning.terms import Term
from training.planning.workload import Workload

GPU = Machine("h100", 2**60, known_gpus()["h100"], 8)  # memory without end: the loss is whole
CPU = Machine("cpu", 2**40, known_gpus()["h100"], 1)
NOT_ALLOCATED = ("NCCL's buffers",)

MODELS: dict[str, dict[str, Any]] = {
    "345M": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "345M/2": {"n_layer": 12, "n_head": 16, "n_embd": 1024},
    "345M/6": {"n_layer": 4, "n_head": 16, "n_embd": 1024},
    "uneven": {"n_layer": 5, "n_head": 6, "n_embd": 42, "seq_len": 18, "vocab_size": 257},  # FSDP's shards are
    "7B": {"n_layer": 32, "n_head": 32, "n_embd": 4096, "seq_len": 2048},
}


INTERLEAVED: dict[str, Any] = {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}
MIXED: dict[str, Any] = {"tensor": 2, "sequence_parallel": True, "pipeline": 2, "data": 2, "zero_stage": 2}


def case(model: str, rank: int = 0, **keys: Any) -> dict[str, Any]:
    """A case in bfloat16 without dropout; `keys` are those of `parallel` and `train`."""
    names = {"tensor", "sequence_parallel", "pipeline", "schedule", "virtual_stages", "data", "zero_stage"}
    return {
        "model": {**MODELS[model], "dropout": 0.0},
        "parallel": {key: value for key, value in keys.items() if key in names},
        "train": {"precision": "bfloat16", **{key: value for key, value in keys.items() if key not in names}},
        "rank": rank,
        "title": f"{model} {' '.join(f'{key} {value}' for key, value in keys.items())}"
        + (f" rank {rank}" * (rank > 0)),
    }


QUICK = [
    case("345M/6", micro_batch_size=8),
    case("345M/6", micro_batch_size=8, recompute="selective", tensor=2, sequence_parallel=True),
    case("345M/6", micro_batch_size=2, data=2, zero_stage=1, accumulation=2),
    case("345M/6", micro_batch_size=1, data=4, zero_stage=3, accumulation=2, recompute="full", precision="float32"),
    case("345M/6", 1, micro_batch_size=4, pipeline=2, accumulation=6),
]
UNEVEN = [
    case("uneven", micro_batch_size=1, tensor=3, sequence_parallel=True),
    case("uneven", 1, micro_batch_size=1, **INTERLEAVED, accumulation=2),
    case("uneven", micro_batch_size=1, data=5, zero_stage=3),
    case("uneven", 4, micro_batch_size=1, **MIXED, accumulation=4),
]
CASES = [
    *(case("345M", micro_batch_size=8, recompute=kind) for kind in ("none", "full", "selective")),
    case("345M", micro_batch_size=8, loss="chunked"),
    *(case("345M", micro_batch_size=8, tensor=2, sequence_parallel=slices) for slices in (True, False)),
    *(case("345M/2", micro_batch_size=8, data=2, zero_stage=zero, accumulation=2) for zero in (0, 1, 2, 3)),
    case("345M/2", micro_batch_size=4, pipeline=4, accumulation=16),
    case("345M/2", micro_batch_size=2, pipeline=2, accumulation=4, schedule="gpipe"),
    case("345M/2", micro_batch_size=4, **INTERLEAVED, accumulation=4),
    case("7B", micro_batch_size=2, tensor=4, sequence_parallel=True, data=2, zero_stage=1, recompute="full"),
    case("7B", micro_batch_size=4, data=4, zero_stage=1, recompute="full"),
    case("7B", micro_batch_size=2, data=4, zero_stage=3, recompute="full", accumulation=2),
]


def planned(case: dict[str, Any], machine: Machine = GPU) -> tuple[Workload, Layout]:
    """What the planner is asked."""
    train = {"iterations": 10, "compile": "none", **case["train"]}
    experiment = Experiment.model_validate({**{key: case[key] for key in ("model", "parallel")}, "train": train})
    return Workload.of(experiment, machine), Layout.of(experiment)


def pipeline_rank(case: dict[str, Any]) -> int:
    """The pipeline rank of the case's process: ranks are (pp, dp, tp) with tp fastest."""
    parallel = case["parallel"]
    return int(case["rank"] // (parallel.get("data", 1) * parallel.get("tensor", 1)))


def predicted(case: dict[str, Any]) -> float:
    """The bytes that tensors hold at the peak of the case's rank."""
    workload, layout = planned(case)
    terms: list[Term] = rank_terms(workload, layout, GPU, pipeline_rank(case))
    return total([term for term in terms if term.part != "context" and term.name not in NOT_ALLOCATED])


def main() -> int:
    print("| layout | predicted, MiB | simulated, MiB | error |\n|---|---|---|---|")
    for each, found in zip(CASES, simulated(CASES), strict=True):
        mine, peak = predicted(each), found["peak"]
        print(f"| {each['title']} | {mine / 2**20:,.0f} | {peak / 2**20:,.0f} | {100 * (mine / peak - 1):+.1f} % |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
