"""Run the whole toolkit on the embedded site; `make demo` installs everything and runs this.

    python -m workflow.demo

Runs `snakemake all` on config.yaml in the current folder, then prints a summary of one screen: what
each step kept, the loss, a generated text, where the results are and what to try next. Finished
work is not repeated.
"""

import shutil
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


def summary(settings: Settings, columns: int = COLUMNS) -> str:
    """The summary of a finished run and its last model: 24 lines, which fit, except for paths."""
    run = settings.run
    rows = [_row(step, columns) for step in funnel(run, settings) if step.documents_in and step.name != "merge_index"]
    lines = [*text_table(rows, "lrrll").splitlines(), ""]
    others = [f"dataset     {settings.dataset_prefix}.bin, .idx"]
    for name in settings.models_of_all[-1:]:
        lines += [*_training(settings, name, columns), ""]
        merged = steps.result("merge", run, name).parent
        others += [
            f"model       {merged}   (transformers loads it)",
            f'more text   python -m training.generate --checkpoint {merged} --prompt "The"',
        ]
    lines += [f"report      {run / 'report.html'}   (open it in a browser)", *others]
    lines.append("next        docs/quickstart.md: more models, your text or URLs, a test Slurm")
    return "\n".join(lines)


def _row(step: FunnelStep, columns: int) -> list[str]:
    """A step's name, counts in and out, their unit, and the reasons of drops or the tokens."""
    note = textwrap.shorten(
        ", ".join(f"{count} {reason}" for reason, count in step.reasons), columns - 48, placeholder=" …"
    )
    note = f"dropped: {note}" if note else f"{step.tokens:,} tokens" if step.tokens else ""
    return [step.name, f"{step.documents_in:,}", f"-> {step.documents_out:,}", step.unit, note]


def _training(settings: Settings, name: str, columns: int) -> list[str]:
    """The training's length, the losses on held-out documents, and a generated text."""
    (model,) = [model for model in trained_models(settings.run) if model.name == name]
    done = read_json(settings.model_folder(name) / "done.json")
    experiment, seconds = settings.models[name], int(model.seconds or 0)
    facts = [
        f"{name}: {done['iteration']:,} iterations, {done['consumed_samples'] * experiment.model.seq_len:,} tokens in "
        f"{seconds // 60}:{seconds % 60:02d} min, {experiment.parallel.tensor} tensor-parallel ranks"
    ]
    losses, at = model.valid.values("loss"), model.valid.values("iteration")
    if len(losses):
        per_byte = (model.evaluation or {}).get("bits_per_byte")
        facts.append(
            f"held-out loss: {losses[0]:.2f} after {at[0]:.0f} iterations, {losses[-1]:.2f} after "
            f"{at[-1]:.0f}{f' ({per_byte:.2f} bits per byte)' if per_byte else ''}"
        )
    lines = [line for fact in facts for line in textwrap.wrap(fact, columns, subsequent_indent="  ")]
    samples = split_samples(model.sample or "", None)
    wrapped = textwrap.wrap(" ".join(samples[0].text.split()), columns - 2, max_lines=_TEXT_LINES, placeholder=" …")
    lines += ["", f"{name} continues {settings.generate.prompt!r}:", *(f"  {line}" for line in wrapped)]
    spans = [span for sample in samples for span in sample.sources[1:]]
    if spans:
        return [*lines, *_verbatim(max(spans, key=lambda span: int(span.split()[0])), columns)]
    return [*lines, *["verbatim: no 8 tokens of it stand in the training data"] * bool(samples[0].sources)]


def _verbatim(span: str, columns: int) -> list[str]:
    """`12 tokens 'text': URL, first read in iteration 78` in two lines; a long text is cut off."""
    head, _, read = span.rpartition(", ")
    quote, _, place = head.rpartition(": ")
    room = columns - len(f"verbatim: , {read}")
    return [f"verbatim: {quote if len(quote) <= room else f'{quote[: room - 1]}…'}, {read}", f"  {place}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    cli.parser("workflow.demo", __doc__).parse_args(argv)
    settings = load_settings(Path("config.yaml"))
    run_snakemake()
    print(f"\n{summary(settings, min(COLUMNS, shutil.get_terminal_size((COLUMNS, LINES)).columns))}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
