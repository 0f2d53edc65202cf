"""The options that several commands share, and the settings that they name."""

import argparse
from pathlib import Path

from common.cli.parsing import Inputs, Parser, input_path, output_file, output_folder, positive_int, shards
from common.config import TOP_LEVEL, load_settings, validate, with_overrides
from common.errors import InputError
from common.files import shard_paths
from common.settings import Experiment, Settings


def add_settings(parser: Parser, section: str = "") -> None:
    """Add `--config FILE`, and accept `section.key=value` anywhere; see `read_settings`."""
    parser.keys = frozenset(Settings.model_fields)
    used = f" (this command uses its section {section})" if section else ""
    key = f"{section or 'section'}.key=value replaces one key"
    parser.add_argument("--config", type=input_path, metavar="FILE", help=f"configuration file{used}; {key}")


def add_model_settings(parser: Parser, *, required: bool = True) -> None:
    """Add `--config FILE --model NAME`, and accept `section.key=value` for that model."""
    parser.keys = frozenset(Experiment.model_fields) | TOP_LEVEL
    parser.add_argument("--config", type=input_path, required=required, metavar="FILE", help="configuration")
    parser.add_argument(
        "--model",
        required=required,
        metavar="NAME",
        help="name of a model under models: in the configuration; section.key=value replaces one of its keys, "
        "cluster.key=value or run=FOLDER one outside models:",
    )
    if required:
        given = "name of a new model with the settings of NAME"
        parser.add_argument("--name", dest="new_model", metavar="NEW", help=given)


def read_settings(arguments: argparse.Namespace) -> Settings:
    """The settings of `--config`, or the defaults, with the overrides. Raises ConfigError.

    With --name, `arguments.model` becomes the new name.
    """
    if arguments.config is None:
        return validate(with_overrides({"run": "results", "urls": ["-"]}, arguments.overrides), "command line")
    model, name = getattr(arguments, "model", None), getattr(arguments, "new_model", None)
    settings = load_settings(arguments.config, arguments.overrides, model, name)
    if model is None:
        return settings
    arguments.model = name or model
    return settings.model_copy(update={"cluster": settings.cluster_of(arguments.model)})


def add_input(parser: argparse.ArgumentParser, kind: Inputs = shards, *, required: bool = True) -> None:
    """Add `--input` for shards of documents, or for lists."""
    parser.add_argument("--input", type=kind, nargs="+", required=required, metavar="PATH", help="paths or globs")


def add_earlier(parser: argparse.ArgumentParser, known: str) -> None:
    """Add `--known`, inputs of earlier runs, and `--removed`, files with ids of documents."""
    parser.add_argument("--known", type=input_path, nargs="+", default=[], metavar="PATH", help=known)
    meaning = "ids of documents to drop as `removed`, such as the takedown/ids.txt of a run; a file need not exist"
    parser.add_argument("--removed", type=Path, nargs="+", default=[], metavar="FILE", help=meaning)


def add_output_shards(parser: argparse.ArgumentParser, content: str, ending: str) -> None:
    """Add `--output FILE`, or `--output-dir DIR --shards N`; see `output_shards`."""
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--output", type=output_file, metavar="FILE", help=content)
    output.add_argument("--output-dir", type=output_folder, metavar="DIR", help=f"folder for 0000{ending}, …")
    parser.add_argument("--shards", type=positive_int, metavar="N", help="number of shards in --output-dir")


def output_shards(arguments: argparse.Namespace, ending: str) -> list[Path]:
    """The files that the options of `add_output_shards` name. Raises InputError for a half."""
    if (arguments.output_dir is None) != (arguments.shards is None):
        raise InputError("--output-dir and --shards belong together; give both or neither")
    if arguments.output:
        return [arguments.output]
    return shard_paths(arguments.output_dir, arguments.shards, ending)


def add_stats(parser: argparse.ArgumentParser) -> None:
    """Add `--stats`."""
    parser.add_argument("--stats", type=output_file, metavar="FILE", help="statistics, as JSON")


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add `--workers`."""
    parser.add_argument("--workers", type=positive_int, default=1, metavar="N", help="processes (default 1)")


def add_step_options(parser: Parser, section: str) -> None:
    """Add the options that every step over shards has in addition to its inputs and outputs."""
    parser.add_argument("--rejects", type=output_file, metavar="FILE", help="dropped documents, with the reasons")
    add_stats(parser)
    add_workers(parser)
    add_settings(parser, section)
    parser.add_argument("--allow-empty", action="store_true", help="allow a shard with no documents left")
