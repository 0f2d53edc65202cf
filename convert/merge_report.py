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
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import xxhash

from common.files import write_json
from convert.replicas import Replicas
from convert.sources.source import Source
from training.huggingface.origin import REPORT, digest

_PROJECT = "urls-to-gpt2"
_OPEN = 256  # files at a time: a process may open 1,024
_PART = 1 << 20  # bytes of the largest file that are hashed at a time: fits a core's cache


def hash_files(
    paths: Sequence[Path], progress: Callable[[int], None] = lambda count: None
) -> dict[Path, dict[str, Any]]:
    """`{"size": bytes, "xxh3": hex}` of each file; `progress` is called with the bytes done.

    A part of each file in turn, so that all reach their ends together: a merge that reads the layers of all ranks at
    the same time finds the bytes in the page cache. Raises OSError naming a file that cannot be read.
    """
    entries: dict[Path, dict[str, Any]] = {}
    for start in range(0, len(paths), _OPEN):
        entries |= _hash_together(paths[start : start + _OPEN], progress)
    return entries


def _hash_together(paths: Sequence[Path], progress: Callable[[int], None]) -> dict[Path, dict[str, Any]]:
    hashes = {path: xxhash.xxh3_128() for path in paths}
    sizes = dict.fromkeys(paths, 0)
    with ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb", buffering=0)) for path in paths}
        totals = {path: os.fstat(file.fileno()).st_size for path, file in files.items()}
        rounds = max(1, max(totals.values(), default=0) // _PART)
        buffers = {path: memoryview(bytearray(totals[path] // rounds + 1)) for path in paths}
        while files:
            for path, file in list(files.items()):
                count = file.readinto(buffers[path])
                if not count:
                    del files[path]
                hashes[path].update(buffers[path][:count])
                sizes[path] += count
                progress(count)
    return {path: {"size": sizes[path], "xxh3": hashes[path].hexdigest()} for path in paths}


@dataclass(frozen=True)
class Findings:
    """What the commands that make a folder know beside its source."""

    files: Mapping[Path, Mapping[str, Any]]
    """Of `hash_files`: the source's files."""
    replicas: Replicas
    proof: Mapping[str, Any]
    """JSON types: tokens, tolerance, largest difference."""
    dtype: torch.dtype
    """That was written."""
    notes: Sequence[str] = field(default=())
    """Beside the source's own."""


def write_report(folder: Path, source: Source, findings: Findings, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Write merge_report.json to a folder that is complete but for training.json.

    `known` has the entries of files that were hashed while they were written.
    """
    drifted: dict[str, dict[str, Any]] = {}
    for drift in findings.replicas.drifted:
        largest = drift.largest_difference
        found = {"elements": drift.elements, "largest_difference": largest if math.isfinite(largest) else str(largest)}
        drifted.setdefault(drift.tensor, {})[drift.holder] = found
    compared = findings.replicas.compared
    report = {
        "format": 1,
        "source": {
            "path": str(source.path.absolute()),
            "layout": source.layout,
            "iteration": source.iteration,
            "consumed_samples": source.consumed_samples,
            "files": {_relative(path, source.path): dict(entry) for path, entry in findings.files.items()},
            "facts": dict(source.facts),
        },
        "model": asdict(source.model) | {"dtype": str(findings.dtype).removeprefix("torch.")},
        "replicas": {"compared": compared, "equal": compared - len(findings.replicas.drifted), "drifted": drifted},
        "proof": dict(findings.proof),
        "notes": [*source.notes, *findings.notes],
        "versions": {_PROJECT: _version(), "torch": torch.__version__, "python": platform.python_version()},
        "output": {path.name: dict(known.get(path.name) or digest(path)) for path in sorted(folder.iterdir())},
    }
    write_json(folder / REPORT, report)


def _relative(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path.absolute())


def _version() -> str:
    try:
        return metadata.version(_PROJECT)
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
