"""Run the whole toolkit on the embedded site; `make demo` installs everything and runs this.

    python -m demo

Runs `snakemake all` on config.yaml in the current folder, then prints a generated text and the paths of the results. A
lock left by a killed run is removed, the lock of a live one is respected. Finished work is not repeated.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from common import cli
from common.config import load_settings
from common.errors import InputError, ToolkitError

SNAKEMAKE = [sys.executable, "-m", "snakemake"]


def snakemake_is_running(folder: Path) -> bool:
    """Whether a Snakemake process runs in `folder`."""
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline()
            if any("snakemake" in argument for argument in arguments[:3]) and Path(process.cwd()) == folder:
                return True
        except psutil.Error:  # it ended, or belongs to another user
            continue
    return False


def remove_stale_lock(folder: Path) -> None:
    """Unlock the working folder after a kill -9. Raises InputError if the owner of the lock is alive."""
    locks = folder / ".snakemake" / "locks"
    if not locks.is_dir() or not any(locks.iterdir()):
        return
    if snakemake_is_running(folder):
        raise InputError(f"{locks}: Snakemake is running in this folder; wait for it or stop it")
    subprocess.run([*SNAKEMAKE, "--unlock", "--quiet", "all"], check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    cli.parser("demo", __doc__).parse_args(argv)
    settings = load_settings(Path("config.yaml"))
    remove_stale_lock(Path.cwd())
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
