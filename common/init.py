"""Start a working folder: the Snakefile, its rules, profiles and example configurations.

    python -m common.init runs

A clone of the repository is such a folder already; this is for a toolkit installed from a wheel. In
the folder, `python -m workflow.demo` runs the demo, and `snakemake` a configuration. The files are
copies: after an upgrade, start another folder, or replace them with --force. Each call also writes
config.schema.json (in a clone, too), by which editors check configurations.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from common import cli
from common.errors import InputError
from common.files import write_text
from common.settings import Settings

PROJECT = "urls-to-gpt2"
PARTS = ("Snakefile", "config.yaml", "workflow/rules", "profiles", "slurm", "configs")
"""The content of a working folder besides results; pyproject.toml puts it into the wheel."""
SCHEMA = "config.schema.json"
"""The JSON schema of configurations; the first line of each of ours names it."""


def workflow_files() -> dict[str, Path]:
    """The files of a working folder by path. Raises InputError if they were not installed."""
    clone = Path(__file__).resolve().parents[1]
    is_clone = (clone / "Snakefile").is_file()
    # not a clone: lib/python3.11/site-packages, below sys.prefix or ~/.local
    root = clone if is_clone else clone.parents[2] / "share" / PROJECT
    if not (root / "Snakefile").is_file():
        raise InputError(f"{root / 'Snakefile'}: not installed; install the wheel, or work in a clone")
    paths = [path for part in PARTS for path in (root / part, *sorted((root / part).rglob("*")))]
    files = [path for path in paths if path.is_file() and path.suffix not in (".py", ".pyc")]
    return {str(path.relative_to(root)): path for path in files}


def start(folder: Path, force: bool = False) -> list[Path]:
    """Copy the files into a folder; returns those written. Raises InputError before writing any."""
    texts = {folder / name: path.read_text(encoding="utf-8") for name, path in workflow_files().items()}
    texts[folder / SCHEMA] = json.dumps(Settings.model_json_schema(), indent=1) + "\n"
    changed = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    existing = [path for path in changed if path.exists() and path.name != SCHEMA]
    if existing and not force:
        raise InputError(f"{existing[0]}: exists and differs; name another folder, or replace it with --force")
    for path in changed:
        write_text(path, texts[path])
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("common.init", __doc__)
    parser.add_argument("folder", type=cli.output_folder, help="where to work; created if it does not exist")
    parser.add_argument("--force", action="store_true", help="replace files that exist and differ")
    arguments = parser.parse_args(argv)
    print(f"{arguments.folder}: {len(start(arguments.folder, arguments.force))} files written")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
