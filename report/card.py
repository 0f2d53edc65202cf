"""The card of a merged checkpoint: its files with hashes, where they come from, and the proof of its logits."""

from dataclasses import dataclass
from typing import Any

from report.models import Model


@dataclass(frozen=True)
class Card:
    """What a person checks before they use the weights."""

    name: str
    facts: list[tuple[str, str]]
    files: list[tuple[str, int, str]]
    """(name, bytes, xxh3)."""


def card_of(model: Model) -> Card | None:
    """The card of a model; None if it has not been merged."""
    if model.merged is None:
        return None
    merged = model.merged
    source, replicas = merged.get("source", {}), merged.get("replicas", {})
    shape = merged.get("model", {})
    facts = [
        ("source", _joined(source.get("path"), source.get("layout"))),
        ("iteration", _joined(_number(source.get("iteration")), _number(source.get("consumed_samples"), "samples"))),
        ("architecture", _architecture(shape)),
        ("weights", str(shape.get("dtype", ""))),
        (
            "replicas",
            f"{replicas['equal']:,} of {replicas['compared']:,} compared are equal" if replicas.get("compared") else "",
        ),
        ("proof", _proof(merged.get("proof"))),
        ("notes", "; ".join(merged.get("notes", []))),
    ]
    files = {**merged.get("output", {}), **model.files}
    listed = [(name, int(entry["size"]), str(entry["xxh3"])) for name, entry in sorted(files.items())]
    return Card(model.name, [(name, value) for name, value in facts if value], listed)


def _proof(proof: dict[str, Any] | None) -> str:
    if not proof:
        return ""
    return (
        f"logits of {proof['tokens']:,} tokens equal the source's within {proof['largest_difference']:.2g} "
        f"({proof['relative_difference']:.2g} of the largest; {proof['tolerance']:.2g} is allowed)"
    )


def _architecture(shape: dict[str, Any]) -> str:
    names = {
        "n_layer": "layers",
        "n_embd": "wide",
        "n_head": "heads",
        "n_positions": "positions",
        "vocab_size": "words",
    }
    text = ", ".join(f"{shape[key]:,} {name}" for key, name in names.items() if key in shape)
    return f"GPT-2, {text}{', tied head' if shape.get('tied') else ''}" if text else ""


def _number(value: int | None, unit: str = "") -> str:
    return "" if value is None else f"{value:,} {unit}".strip()


def _joined(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)
