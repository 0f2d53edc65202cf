"""Run the whole toolkit on the embedded site; `make demo` installs everything and runs this.

    python -m workflow.demo

Runs `snakemake all` on config.yaml in the current folder, then prints a summary of one screen: what
each step kept, the loss, a generated text, where the results are and what to try next. Finished
work is not repeated.
"""

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from common import cli, steps
from common.config import load_settings
from common.console import text_table
from common.errors import ToolkitError
from common.files import read_json
from common.settings import Settings
from workflow.report.funnel import FunnelStep, funnel
from workflow.report.models import split_samples, trained_models

SNAKEMAKE = [sys.executable, "-m", "snakemake"]
LINES, COLUMNS = 24, 100
_TEXT_LINES = 4  # of the generated text


def run_snakemake() -> None:
    """Run `snakemake all`, which shows its progress. Raises ToolkitError if it fails."""
    with subprocess.Popen([*SNAKEMAKE, "all", "--quiet", "rules", "reason", "host"]) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # Snakemake stops its jobs
            raise
    if code:
        raise ToolkitError(
            f"snakemake stopped with exit code {code}; its errors are above, and all of its output in the newest file "
            "of .snakemake/log"
        )


def summary(settings: Settings) -> str:
    """The summary of a finished run and its last model: at most 24 lines of at most 100 columns."""
    run = settings.run
    rows = [_row(step) for step in funnel(run, settings) if step.documents_in and step.name != "merge_index"]
    lines = [*text_table(rows, "lrrll").splitlines(), ""]
    others = [f"dataset     {settings.dataset_prefix}.bin, .idx"]
    for name in settings.models_of_all[-1:]:
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
    """A step's name, counts in and out, their unit, and the reasons of drops or the tokens."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    cli.parser("workflow.demo", __doc__).parse_args(argv)
    settings = load_settings(Path("config.yaml"))
    run_snakemake()
    print(f"\n{summary(settings)}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
