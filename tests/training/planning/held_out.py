"""Random layouts that no formula was fitted to, predicted and simulated.

    python -m tests.training.planning.held_out 20261122     # the seed; seven minutes on a busy core

After a change of the formulas, take another seed: layouts that a change was made for are no check of it.
"""

import random
import sys
from typing import Any

from pydantic import ValidationError

from tests.training.planning.cases import planned, predicted
from tests.training.planning.simulated_step import run_worker


def draw(rng: random.Random) -> dict[str, Any]:
    """A case; it may be invalid."""
    tensor, pipeline, data = rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 2, 3, 8])
    virtual = rng.choice([1, 1, 2]) if pipeline > 1 else 1
    parallel = {
        "tensor": tensor,
        "sequence_parallel": tensor > 1 and rng.random() < 0.6,
        "pipeline": pipeline,
        "data": data,
        "zero_stage": rng.choice([0, 1, 2, 3]) if data > 1 else 0,
        "virtual_stages": virtual,
        "schedule": "interleaved_1f1b"
        if virtual > 1
        else rng.choice(["1f1b", "1f1b", "gpipe"])
        if pipeline > 1
        else "1f1b",
    }
    model = {
        "n_layer": rng.choice([4, 6, 8, 10]),
        "n_head": 8,
        "n_embd": rng.choice([256, 512, 1024, 2048]),
        "seq_len": rng.choice([256, 512, 1024]),
        "vocab_size": rng.choice([8000, 32000, 50257]),
        "dropout": 0.0,
    }
    train = {
        "micro_batch_size": rng.choice([1, 2, 3, 6, 12]),
        "accumulation": rng.choice([1, 2, 3, 4, 6, 8]),
        "recompute": rng.choice(["none", "selective", "full"]),
        "precision": rng.choice(["bfloat16", "float32"]),
        "loss": rng.choice(["whole", "whole", "chunked"]),
    }
    return {"model": model, "parallel": parallel, "train": train}


def main(argv: list[str]) -> int:
    rng, cases = random.Random(int(argv[0])), []
    while len(cases) < 40:
        case = draw(rng)
        try:
            planned(case)
        except ValidationError:
            continue
        sizes = case["parallel"]
        cases.append({**case, "rank": rng.randrange(sizes["pipeline"]) * sizes["data"] * sizes["tensor"]})
    errors = []
    for case, found in zip(cases, run_worker("simulated_step", cases), strict=True):
        errors.append(predicted(case) / found["peak"] - 1)
        if abs(errors[-1]) > 0.03:
            print(f"{100 * errors[-1]:+.1f} % {case}")
    sizes = sorted(map(abs, errors))
    middle, tenth, worst = (100 * sizes[index] for index in (len(sizes) // 2, len(sizes) * 9 // 10, -1))
    print(f"{len(sizes)} layouts: median {middle:.1f} %, nine of ten below {tenth:.1f} %, worst {worst:.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
