"""Show the state of training jobs: queued, running or how it ended, iteration, losses, speed, time left.

    python -m cluster.status
    python -m cluster.status results/demo/models/tiny --json
    python -m cluster.status results/demo --watch

Without an argument it lists every model folder below results/. Slurm is asked once for all of them; if it does not
answer, the states are those that the files of the model folders tell.

--watch also takes run folders (without an argument: all below results/), and shows the shards of each corpus step that
are done, running and queued, and the disk space that is used. On a terminal the table is drawn again every 5 seconds,
until Ctrl-C; elsewhere it is printed once.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import orjson

from cluster.jobs import read_job, require_folder
from cluster.training_status import ALIGN, COLUMNS, look_at, model_status, row
from common import cli
from common.errors import InputError
from common.tables import text_table


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.status", __doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        type=cli.input_path,
        metavar="FOLDER",
        help="model folders (default results/*/models/*); with --watch also run folders (default results/*)",
    )
    parser.add_argument("--watch", action="store_true", help="a live table of corpus and training, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="for scripts: a list with one object per model folder")
    arguments = parser.parse_args(argv)
    if arguments.watch:
        if arguments.json:
            raise InputError("--watch is for people and --json for scripts; give one of them")
        for folder in arguments.folders:
            if not folder.is_dir():
                raise InputError(f"{folder}: no such run or model folder")
        from cluster.watch import watch  # rich takes a tenth of a second

        return watch(arguments.folders)
    for folder in arguments.folders:
        require_folder(folder)
    folders = arguments.folders or sorted(path for path in Path("results").glob("*/models/*") if path.is_dir())
    if not folders:
        raise InputError("results/*/models/*: no model folder yet; start training with python -m cluster.submit")
    jobs = [read_job(folder) for folder in folders]
    known = look_at([job for job in jobs if job is not None])
    found = [
        model_status(folder, job, known[job.executor] if job is not None else None)
        for folder, job in zip(folders, jobs, strict=True)
    ]
    if arguments.json:
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        print(text_table([COLUMNS, *map(row, found)], ALIGN))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
