"""Hands a planned layout over to the commands that measure it, in this process's place.

    replace_process(probe_command(argv))       # python -m training.plan … --probe
    replace_process(autotune_command(argv))    # python -m training.plan … --autotune 5

`argv` is the planner's command line without the program. training may not import cluster, so it starts it.
"""

from collections.abc import Mapping, Sequence

from common.errors import InputError

# What becomes of an option with a value: `--name` passes it on, `section.key` makes it an override.
_BOTH = {
    "--config": "--config",
    "--model": "--model",
    "--seq-len": "model.seq_len",
    "--precision": "train.precision",
}
_PROBE = {
    **_BOTH,
    "--global-batch-size": "train.global_batch_size",
    "--micro-batch-size": "train.micro_batch_size",
}
_SAME = ("--gpus", "--gpu", "--global-batch-size", "--max-global-batch-size", "--micro-batch-size", "--write")
_AUTOTUNE = {**_BOTH, "--autotune": "--top", **{option: option for option in _SAME}}


def probe_command(argv: Sequence[str]) -> list[str]:
    """The command line of `python -m training.probe`, from the planner's with --probe. Raises InputError."""
    return ["training.probe", *_translated(argv, _PROBE, "--probe", "the device of this process")]


def autotune_command(argv: Sequence[str]) -> list[str]:
    """The command line of `python -m cluster.autotune`, from the planner's with --autotune K. Raises InputError."""
    return ["cluster.autotune", *_translated(argv, _AUTOTUNE, "--autotune", "the configured cluster")]


def _translated(argv: Sequence[str], options: Mapping[str, str], flag: str, where: str) -> list[str]:
    """The options for another command, in their order."""
    words, command = list(argv), list[str]()
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            command.append(word)  # section.key=value
            continue
        if word == "--quiet" or (word in ("--probe", "--given") and flag == "--probe"):
            continue
        if name not in options:
            raise InputError(f"{flag} measures on {where} and takes no {name}; leave one of them out")
        if not equals:
            value = words.pop(0) if words else ""
        target = options[name]
        command += [target, value] if target.startswith("-") else [f"{target}={value}"]
    return command
