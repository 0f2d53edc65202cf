"""Run the whole toolkit on the embedded site; `make demo` installs everything and runs this.

    python -m demo

Runs `snakemake all` on config.yaml in the current folder, then prints a generated text and the paths of the results.
Finished work is not repeated.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common import cli
from common.config import load_settings
from common.errors import ToolkitError

SNAKEMAKE = [sys.executable, "-m", "snakemake"]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    cli.parser("demo", __doc__).parse_args(argv)
    settings = load_settings(Path("config.yaml"))
    code = subprocess.run([*SNAKEMAKE, "all", "--quiet", "reason", "host"], check=False).returncode
    if code:
        raise ToolkitError(f"snakemake stopped with exit code {code}; the failed step's log is shown above")
    for name in settings.train_models:
        sample = (settings.run / "samples" / f"{name}.txt").read_text(encoding="utf-8").strip()
        print(f"\n--- {name} continues {settings.generate.prompt!r}\n\n{sample}\n")
        print(f"checkpoint: {settings.run / 'merged' / name}")
    print(f"dataset:    {settings.dataset_prefix}.bin, .idx")
    print(f"report:     {settings.run / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
