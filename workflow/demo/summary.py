"""The summary of the demo: counts of each step, the training, a generated text and what to run next.

It fits one screen of 24 lines with 100 columns.
"""

import textwrap

from common import steps
from common.console import text_table
from common.files import read_json
from common.settings import Settings
from workflow.report.funnel import FunnelStep, funnel
from workflow.report.models import split_samples, trained_models

LINES, COLUMNS = 24, 100
_TEXT_LINES = 4  # of the generated text


def summary(settings: Settings) -> str:
    """The summary of a finished run whose last model is shown: at most 24 lines of at most 100 columns."""
    run = settings.run
    rows = [_row(step) for step in funnel(run, settings) if step.documents_in and step.name != "merge_index"]
    lines = [*text_table(rows, "lrrll").splitlines(), ""]
    others = [f"dataset     {settings.dataset_prefix}.bin, .idx"]
    for name in settings.train_models[-1:]:
        lines += [*_training(settings, name), ""]
        merged = steps.result("merge", run, name).parent
        others += [
            f"model       {merged}   (transformers loads it)",
            f'more text   python -m training.generate --checkpoint {merged} --prompt "The"',
        ]
    lines += [f"report      {run / 'report.html'}   (open it in a browser)", *others]
    lines.append("next        docs/quickstart.md: a second model size, your own text or URLs, a test Slurm")
    return "\n".join(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…" for line in lines)


def _row(step: FunnelStep) -> list[str]:
    """A step's name, the counts in and out, their unit, and the reasons of what was dropped, or the tokens."""
    note = textwrap.shorten(", ".join(f"{count} {reason}" for reason, count in step.reasons), 52, placeholder=" …")
    note = f"dropped: {note}" if note else f"{step.tokens:,} tokens" if step.tokens else ""
    return [step.name, f"{step.documents_in:,}", f"-> {step.documents_out:,}", step.unit, note]


def _training(settings: Settings, name: str) -> list[str]:
    """The training's length, the losses on held-out documents, and a generated text."""
    (model,) = [model for model in trained_models(settings.run) if model.name == name]
    done = read_json(settings.model_folder(name) / "done.json")
    experiment, seconds = settings.models[name], int(model.seconds or 0)
    lines = [
        f"{name}: {done['iteration']:,} iterations, {done['consumed_samples'] * experiment.model.seq_len:,} tokens in "
        f"{seconds // 60}:{seconds % 60:02d} min, {experiment.parallel.tensor} tensor-parallel processes"
    ]
    losses, at = model.valid.values("loss"), model.valid.values("iteration")
    if len(losses):
        per_byte = (model.evaluation or {}).get("bits_per_byte")
        lines.append(
            f"loss on held-out documents: {losses[0]:.2f} after {at[0]:.0f} iterations, {losses[-1]:.2f} after "
            f"{at[-1]:.0f}{f' ({per_byte:.2f} bits per byte)' if per_byte else ''}"
        )
    samples = split_samples(model.sample or "", None)
    wrapped = textwrap.wrap(" ".join(samples[0].text.split()), COLUMNS - 2, max_lines=_TEXT_LINES, placeholder=" …")
    lines += ["", f"{name} continues {settings.generate.prompt!r}:", *(f"  {line}" for line in wrapped)]
    spans = [span for sample in samples for span in sample.sources[1:]]
    longest = max(spans, key=lambda span: int(span.split()[0]), default="no 8 tokens of it stand in the training data")
    verbatim = textwrap.wrap(f"verbatim: {longest}", COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    return [*lines, *(verbatim[:2] if samples[0].sources else [])]
