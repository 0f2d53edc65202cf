"""The closing summary of the demo: what each step made of the site, the training, a text and what to type next.

It fits one screen of 24 lines with 100 columns.
"""

import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from common.files import read_json, read_rows, read_text, shard_paths
from common.settings import Settings
from common.tables import text_table

LINES, COLUMNS = 24, 100
_TEXT_LINES = 5  # of the generated text
# folder of the step below the run: (step, what it counts)
_STEPS = {
    "urls": ("blacklist", "URLs"),
    "pages": ("scrape", "pages"),
    "clean": ("clean", "documents"),
    "dedup": ("dedup", "documents"),
    "tokens": ("tokenize", "documents"),
}


def summary(settings: Settings) -> str:
    """The summary of a finished run whose last model is shown: at most 24 lines of at most 100 columns."""
    run = settings.run
    corpus = {step: counts for step in _STEPS if (counts := _counts(settings, step))["documents_in"]}
    lines = [*text_table(_rows(corpus), "lrrll").splitlines(), ""]
    others = [f"dataset     {settings.dataset_prefix}.bin, .idx"]
    for name in settings.train_models[-1:]:
        lines += [*_training(settings, name), ""]
        lines += [f"{name} continues {settings.generate.prompt!r}:", *_text(run / "samples" / f"{name}.txt"), ""]
        others += [
            f"model       {run / 'merged' / name}   (transformers loads it)",
            f'more text   python -m training.generate --checkpoint {run / "merged" / name} --prompt "The"',
        ]
    lines += [f"report      {run / 'report.html'}   (open it in a browser)", *others]
    lines.append("next        docs/quickstart.md: a second model size, your own text or URLs, a test Slurm")
    return "\n".join(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…" for line in lines)


def _counts(settings: Settings, folder: str) -> Counter[str]:
    """The statistics of a step, summed over its shards; dropped documents as `dropped REASON`."""
    paths = [settings.run / folder / "stats.json"]
    paths += shard_paths(settings.run / folder, settings.shards, ".stats.json")
    total: Counter[str] = Counter()
    for path in filter(Path.is_file, paths):
        stats = read_json(path)
        total.update({key: stats.get(key, 0) for key in ("documents_in", "documents_out", "tokens")})
        total.update({f"dropped {reason}": count for reason, count in stats["reasons"].items()})
    return total


def _rows(corpus: dict[str, Counter[str]]) -> list[list[str]]:
    """A row per step: its name, the counts in and out, their unit, and the reasons of what was dropped."""
    rows = []
    for folder, counts in corpus.items():
        step, unit = _STEPS[folder]
        reasons = {key.removeprefix("dropped "): count for key, count in counts.items() if key.startswith("dropped ")}
        listed = sorted(reasons, key=lambda reason: (-reasons[reason], reason))
        note = textwrap.shorten(", ".join(f"{reasons[reason]} {reason}" for reason in listed), 52, placeholder=" …")
        note = f"dropped: {note}" if note else f"{counts['tokens']:,} tokens" if counts["tokens"] else ""
        rows.append([step, f"{counts['documents_in']:,}", f"-> {counts['documents_out']:,}", unit, note])
    return rows


def _training(settings: Settings, name: str) -> list[str]:
    """What was trained, and how the loss on held-out documents fell."""
    folder, model = settings.run / "models" / name, settings.models[name]
    done = read_json(folder / "done.json")
    seconds = sum(
        float(row["ms_per_iteration"]) * step / 1000 for row, step in _with_steps(read_rows(folder / "train.csv"))
    )
    trained = done["consumed_samples"] * model.model.seq_len
    lines = [
        f"{name}: {done['iteration']:,} iterations, {trained:,} tokens in {_duration(seconds)},"
        f" {model.parallel.tensor} tensor-parallel processes"
    ]
    valid = read_rows(folder / "valid.csv")
    if valid:
        first, last = valid[0], valid[-1]
        line = f"loss on held-out documents: {float(first['loss']):.2f} after {first['iteration']} iterations"
        line += f", {float(last['loss']):.2f} after {last['iteration']}"
        per_byte = read_json(settings.run / "evaluation" / f"{name}.json").get("bits_per_byte")
        line += f" ({per_byte:.2f} bits per byte)" if per_byte else ""
        lines.append(line)
    return lines


def _with_steps(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Each row of a curve with the number of iterations since the row before."""
    found, before = [], 0
    for row in rows:
        found.append((row, int(row["iteration"]) - before))
        before = int(row["iteration"])
    return found


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


def _text(path: Path) -> list[str]:
    """The first text of a file of samples, wrapped and indented, at most a few lines."""
    blocks = [block for block in read_text(path).split("--- sample ") if block.strip()]
    text = blocks[0].split("\n", 1)[1] if len(blocks) > 1 else blocks[0] if blocks else ""
    wrapped = textwrap.wrap(" ".join(text.split()), COLUMNS - 2, max_lines=_TEXT_LINES, placeholder=" …")
    return [f"  {line}" for line in wrapped]
