"""The parts of the GPU benchmark, in the order in which they run."""

from types import ModuleType

from benchmarks.gpu import checkpoints, kernels, machine, planning, profile, steps, suite, texts

PARTS: dict[str, ModuleType] = {
    "machine": machine,
    "tests": suite,
    "kernels": kernels,
    "step": steps,
    "checkpoint": checkpoints,
    "generate": texts,
    "profile": profile,
    "planning": planning,
}

FILES = {part: {"tests": "machine", "profile": "step"}.get(part, part) for part in PARTS}
"""The file of each part, without `.md`: six, so that with rows.jsonl and tests.txt there are at most eight."""

RESERVED = {"kernels": 85.0, "step": 120.0, "checkpoint": 40.0, "generate": 15.0, "profile": 40.0}
"""Seconds that earlier parts leave for a part."""
