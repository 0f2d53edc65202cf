"""The command line of every command: parser, settings, one-line errors, exit codes and signals.

    parser = cli.parser("corpus.clean", __doc__)             # the module docstring is the help text
    parser.add_argument("--input", type=cli.shards, nargs="+")
    cli.add_settings(parser, "clean")                        # --config FILE, clean.key=value
    arguments = parser.parse_args(argv)                      # checks the paths, too
    settings = cli.read_settings(arguments)
    sys.exit(cli.run(main))

Exit codes: 0 done, 2 bad input (one line on stderr, no traceback), 130 interrupted, 143 and 129
ended by SIGTERM or SIGHUP. These signals raise an exception, so that temporary files are removed
and worker processes end.
"""

from common.cli.options import (
    add_earlier,
    add_input,
    add_model_settings,
    add_output_shards,
    add_settings,
    add_stats,
    add_step_options,
    add_workers,
    output_shards,
    read_settings,
)
from common.cli.parsing import (
    any_files,
    checkpoint_path,
    input_path,
    lists,
    new_folder,
    output_file,
    output_folder,
    output_prefix,
    parser,
    positive_int,
    shards,
)
from common.cli.running import refuse_other_copy, run
