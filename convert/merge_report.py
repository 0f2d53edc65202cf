"""merge_report.json: what was merged, from which files, how far replicated tensors had drifted, and the proof.

    {"format": 1,
     "source": {"path": "/runs/345m/iter_0320000", "layout": "Megatron-LM, …", "iteration": 320000,
                "files": {"mp_rank_00/model_optim_rng.pt": {"size": 1, "xxh3": "…"}, …}, "facts": {…}},
     "model": {"n_layer": 24, …, "dtype": "float16"},
     "replicas": {"compared": 294, "equal": 293,
                  "drifted": {"h.3.ln_1.bias": {"tensor rank 1": {"elements": 7, "largest_difference": 1.2e-4}}}},
     "proof": {…}, "notes": ["…"], "versions": {"urls-to-gpt2": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
     "output": {"model.safetensors": {"size": 1, "xxh3": "…"}, …}}

xxh3 is XXH3-128, as in a checkpoint's manifest.json. training.json holds the report's own hash.
"""

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from common.files import digest, write_json
from convert.proof import Proof
from convert.replicas import Replicas
from convert.sources.source import Source
from training.huggingface.origin import REPORT

_PROJECT = "urls-to-gpt2"
Files = Mapping[Any, Mapping[str, Any]]
"""`{"size": bytes, "xxh3": hex}` by file."""


def write_report(
    folder: Path, source: Source, dtype: torch.dtype, replicas: Replicas, proof: Proof, read: Files, written: Files
) -> None:
    """Write merge_report.json to a folder that is complete but for training.json.

    `read` has the entries of the source's files, `written` those of files that were hashed while they were written.
    """
    drifted: dict[str, dict[str, Any]] = {}
    for drift in replicas.drifted:
        largest = drift.largest_difference
        found = {"elements": drift.elements, "largest_difference": largest if math.isfinite(largest) else str(largest)}
        drifted.setdefault(drift.tensor, {})[drift.holder] = found
    report = {
        "format": 1,
        "source": {
            "path": str(source.path.absolute()),
            "layout": source.layout,
            "iteration": source.iteration,
            "consumed_samples": source.consumed_samples,
            "files": {_relative(path, source.path): dict(entry) for path, entry in read.items()},
            "facts": dict(source.facts),
        },
        "model": asdict(source.model) | {"dtype": str(dtype).removeprefix("torch.")},
        "replicas": {
            "compared": replicas.compared,
            "equal": replicas.compared - len(replicas.drifted),
            "drifted": drifted,
        },
        "proof": asdict(proof),
        "notes": list(source.notes),
        "versions": {_PROJECT: _version(), "torch": torch.__version__, "python": platform.python_version()},
        "output": {path.name: dict(written.get(path.name) or digest(path)) for path in sorted(folder.iterdir())},
    }
    write_json(folder / REPORT, report)


def _relative(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path.absolute())


def _version() -> str:
    try:
        return metadata.version(_PROJECT)
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
