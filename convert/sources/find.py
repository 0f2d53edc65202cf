"""Find the checkpoint that a path means, and detect its format."""

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, InputError
from convert.arguments import Options
from convert.sources.source import Source
from training.huggingface.tokenizer import read_tokenizer

# the first that matches; each module has `matches(folder)` and `open_folder(folder, options)`
_FORMATS = ("ours", "torch_dist", "deepspeed", "megatron", "huggingface", "nanogpt", "llmc")
_POINTERS = ("latest_checkpointed_iteration.txt", "latest")  # Megatron's; DeepSpeed's; and ours
_SHOWN = 8  # candidates listed in a message


def open_source(path: Path, options: Options | None = None) -> Source:
    """The checkpoint in `path`: a run, an iteration, a tag, a Hugging Face folder, a file of llm.c.

    CheckpointError if there is none or it is no whole GPT-2; InputError without a given tokenizer.
    """
    options, tokenizer = options or Options(), None
    if options.tokenizer is not None:
        tokenizer = read_tokenizer(options.tokenizer)
        if tokenizer is None:
            raise InputError(f"{options.tokenizer}: has no tokenizer.json, and no vocab.json with merges.txt")
        options = replace(options, vocab_size=options.vocab_size or tokenizer.vocab_size)
    folder = _locate(path)
    try:
        source: Source = _format_of(folder).open_folder(folder, options)
    except CheckpointError as error:  # errors about a tensor do not name the folder
        named = str(error).startswith((str(folder), str(folder.resolve().parent)))
        raise error if named else CheckpointError(f"{folder}: {error}") from None
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: cannot be read ({error.strerror or error}); copy every file of the save"
        ) from None
    return source if tokenizer is None else replace(source, tokenizer=tokenizer, tokenizer_files=())


def _format_of(folder: Path) -> Any:
    """The module that reads `folder`, or one file; None if it is no checkpoint."""
    names = _FORMATS if folder.is_dir() else _FORMATS[-1:]  # llm.c's files may be given themselves
    modules: list[Any] = [import_module(f"convert.sources.{name}") for name in names]
    return next((module for module in modules if module.matches(folder)), None)


def _locate(path: Path) -> Path:
    """The folder, or the only file, of the checkpoint that `path` means. Raises CheckpointError."""
    if _format_of(path):
        return path
    if not path.is_dir():
        hint = f"; give its folder {path.parent}" if path.exists() else ""
        raise CheckpointError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}{hint}")
    if path.name.startswith("mp_rank_"):
        raise CheckpointError(f"{path}: one rank of a checkpoint; give the folder that holds all ranks: {path.parent}")
    folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir()]
    modules = {folder.name: module for folder in folders if (module := _format_of(folder))}
    if any(module.__name__.endswith(".ours") for module in modules.values()):
        from training import checkpoint

        return checkpoint.resolve(path).path  # the newest undamaged one
    for pointer in _POINTERS:
        if (path / pointer).is_file():
            name = _read_pointer(path / pointer)
            if name not in modules:
                state = "holds no complete checkpoint" if (path / name).exists() else "is missing"
                raise CheckpointError(
                    f"{path / pointer}: names {name}, which {state}; restore it, or give the folder of another "
                    f"checkpoint: {_list(modules) or 'there is none'}"
                )
            return path / name
    if len(modules) == 1:
        return path / next(iter(modules))
    if modules:
        raise CheckpointError(f"{path}: holds {_list(modules)}; give one of these folders")
    raise CheckpointError(
        f"{path}: no checkpoint here (iter_*, mp_rank_*, a DeepSpeed tag, .metadata, config.json with weights, "
        "nanoGPT's ckpt.pt, or llm.c's model_*.bin)"
    )


def _list(names: Iterable[str]) -> str:
    all_names = list(names)
    return ", ".join(all_names[:_SHOWN] + ["…"] * (len(all_names) > _SHOWN))


def _read_pointer(path: Path) -> str:
    """The folder that a pointer file names; Megatron's holds an iteration or `release`."""
    text = path.read_text(errors="replace").strip()
    if Path(text).name != text or not 0 < len(text) < 100:
        raise CheckpointError(f"{path}: holds {text[:40]!r}, not the name of a checkpoint; write the right one into it")
    return f"iter_{int(text):07d}" if path.name == _POINTERS[0] and text.isdecimal() else text
