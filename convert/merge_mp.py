"""Merge a GPT-2 checkpoint of any origin and layout into one Hugging Face folder, and prove it.

    python -m convert.merge_mp --checkpoint results/demo/models/tiny --output merged/tiny
    python -m convert.merge_mp --checkpoint megatron/gpt2-345m --output merged/gpt2-345m --dtype bfloat16

Reads checkpoints of this toolkit, Megatron-LM (2019 to 2024), Megatron-core (torch_dist), DeepSpeed (ZeRO 0 to 3,
pipelines), Hugging Face, nanoGPT and llm.c; docs/convert.md has the table. Writes config.json, model.safetensors (or
several with their index), the tokenizer if it is known, README.md (a model card of what is known), and
merge_report.json. The folder appears only after a proof: a fixed batch gives the same logits in the source's own
arithmetic and from the written files. Exit code 1: it does not.

--force replaces an older result if every file in it was written by this command. Needs no GPU, and memory for about two
copies of the largest tensor.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from common import cli, page
from common.console import warn
from common.errors import InputError
from common.files import digest, write_json, write_text
from common.files.writing import replace_folder
from common.progress import Meter
from common.run_card import versions, write_card
from convert import arguments as flags
from convert.arguments import Options, check_output
from training.huggingface.origin import CARD, REPORT, VOCABULARIES, Origin, first_changed_file, write_origin

if TYPE_CHECKING:
    import torch

    from convert.proof import Proof
    from convert.sources.consistency import Replicas
    from convert.sources.source import Source

DTYPES = ("float32", "bfloat16", "float16")
MAX_SHARD_SIZE = 50 * 10**9  # bytes: transformers' default
_SIZE = TypeAdapter(Annotated[ByteSize, Field(gt=0)])
_VERSIONS = ("urls-to-gpt2", "torch", "python")

Files = Mapping[Any, Mapping[str, Any]]
"""`{"size": bytes, "xxh3": hex}` by file."""


def merge(
    path: Path,
    output: Path,
    *,
    options: Options | None = None,
    dtype: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    tokenizer: Path | None = None,
    force: bool = False,
) -> str:
    """Write and prove the folder; returns one line about what was done.

    `dtype` is one of DTYPES, or None for the source's own; `max_shard_size` is in bytes. `tokenizer` is the folder of
    another one than the source's own, or GPT-2's if the vocabulary has its size. Raises CheckpointError if the source
    cannot be read, ProofError if the folder does not compute what it computes.
    """
    import torch

    from convert.assemble import widest_dtype
    from training.launch.device import keep_freed_memory

    keep_freed_memory()  # a whole matrix is allocated for every one that is written
    source = _open(path, output, options, tokenizer, force)
    kept = getattr(torch, dtype) if dtype else widest_dtype(source)

    with replace_folder(output, lambda old: _check_older(output, old, force)) as temporary:
        result = _convert_and_prove(source, temporary, kept, max_shard_size)
        _describe(source, temporary, kept, result)
    if result.replicas.drifted:
        warn(f"{source.path}: {result.replicas}; merge_report.json has all")
    return _summary(source, output, kept, result)


def _open(path: Path, output: Path, options: Options | None, tokenizer: Path | None, force: bool) -> "Source":
    """The source, announced in a line; errors about the output come first."""
    from convert.sources.find import open_source
    from convert.targets.huggingface import check_tokenizer
    from training.huggingface.tokenizer import read_tokenizer

    check_output(output, path)
    if output.is_dir():
        _check_older(output, output, force)
    if tokenizer is None:
        source = open_source(path, options)
    elif given := read_tokenizer(tokenizer):
        options = options or Options()
        options = replace(options, vocab_size=options.vocab_size or given.vocab_size)
        source = replace(open_source(path, options), tokenizer=given, tokenizer_files=())
    else:
        raise InputError(f"{tokenizer}: has no tokenizer.json, and no vocab.json with merges.txt")
    if remark := check_tokenizer(source):
        source = replace(source, notes=(*source.notes, remark))
    flags.announce(source)
    return source


def _check_older(folder: Path, found: Path, force: bool) -> None:
    """Raise InputError unless the older result of `folder`, which is in `found`, may be replaced."""
    if foreign := first_changed_file(found):
        name = foreign.relative_to(found)
        raise InputError(
            f"{folder / name}: not a file that this command wrote; choose another --output, or move it away"
        )
    if not force and any(found.iterdir()):
        raise InputError(f"{folder}: exists already; --force replaces it")


@dataclass(frozen=True)
class _Result:
    """The result: a folder that was written and proved."""

    proof: "Proof"
    replicas: "Replicas"
    read: Files
    """The source's files."""
    written: Files
    """Of the weights, by name."""


def _convert_and_prove(source: "Source", folder: Path, dtype: "torch.dtype", max_shard_size: int) -> _Result:
    """Write the weights tensor by tensor and prove them. Raises ProofError.

    Hashes and compares the source's files and computes its logits at the same time, so each file is read once.
    """
    import torch

    from convert.proof import prove, source_outputs
    from convert.sources.consistency import compare_replicas
    from convert.targets.huggingface import write_folder

    unknown = [path for path in sorted(set(source.files)) if path not in source.hashes]
    total = sum(path.stat().st_size for path in unknown) + source.model.parameters * dtype.itemsize
    one_thread = partial(torch.set_num_threads, 1)  # more would wait for each other and the writer at every product
    with Meter("convert.merge_mp", "bytes", total) as meter, ThreadPoolExecutor(2, initializer=one_thread) as pool:

        def count(size: int) -> None:
            meter.advance(size, size)

        expecting = pool.submit(source_outputs, source, dtype)
        hashing = {path: pool.submit(_hash, path, count) for path in unknown}
        comparing = pool.submit(compare_replicas, source)
        try:
            written = write_folder(folder, source, dtype=dtype, max_shard_size=max_shard_size, progress=count)
            proof = pool.submit(prove, source, expecting.result(), folder).result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        read = {**source.hashes, **{path: entry.result() for path, entry in hashing.items()}}
        return _Result(proof, comparing.result(), read, written)


def _hash(path: Path, count: Callable[[int], None]) -> dict[str, Any]:
    entry = digest(path)
    count(entry["size"])
    return entry


def _describe(source: "Source", folder: Path, dtype: "torch.dtype", result: _Result) -> None:
    """Write the model card, merge_report.json, the origin and the run card."""
    known: dict[str, Any] = {"samples": source.consumed_samples, "split": source.facts.get("split")}
    known |= asdict(source.model) | {"iteration": source.iteration, "parameters": source.model.parameters}
    write_text(folder / "README.md", page.render("training.huggingface", "model_card.md", **known) + "\n")
    files = {path.name: result.written.get(path.name) or digest(path) for path in sorted(folder.iterdir())}
    write_json(folder / REPORT, _report(source, dtype, result, files))
    write_origin(folder, Origin.of_facts(source.iteration, source.consumed_samples, source.facts), result.written)
    write_card(folder / CARD, inputs=[source.path])  # merge_report.json has the hashes


def _report(source: "Source", dtype: "torch.dtype", result: _Result, files: Files) -> dict[str, Any]:
    """The content of merge_report.json, which docs/convert.md explains; `files` are the folder's."""
    folder, used = source.path, versions()
    return {
        "format": 1,
        "source": {
            "path": str(folder.absolute()),
            "layout": source.layout,
            "iteration": source.iteration,
            "consumed_samples": source.consumed_samples,
            "files": {
                str(path.relative_to(folder) if path.is_relative_to(folder) else path.absolute()): entry
                for path, entry in result.read.items()
            },
            "facts": source.facts,
        },
        "model": asdict(source.model) | {"dtype": str(dtype).removeprefix("torch.")},
        "replicas": result.replicas.report(),
        "proof": asdict(result.proof),
        "notes": source.notes,
        "versions": {name: used.get(name, "unknown") for name in _VERSIONS},
        "output": files,
    }


def _summary(source: "Source", output: Path, dtype: "torch.dtype", result: _Result) -> str:
    from convert.targets.huggingface import tokenizer_of

    has_one = any((output / name).exists() for name in VOCABULARIES)
    tokenizer = (
        "without" if not has_one else "with GPT-2's" if tokenizer_of(source) != source.tokenizer else "with its own"
    )
    return (
        f"{output}: merged from {source.path}, vocabulary {source.model.vocab_size}, {tokenizer} tokenizer, "
        f"{str(dtype).removeprefix('torch.')}; {result.replicas}; logits equal the source's within "
        f"{result.proof.largest_difference:.1e}, {result.proof.relative_difference:.1e} of the largest"
    )


def parse_size(text: str) -> int:
    """The bytes of `5GB`, `500MB` or `1000`; decimal units, as transformers counts."""
    try:
        return _SIZE.validate_python(text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB or 500MB") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.merge_mp", __doc__)
    flags.add_source(parser)
    parser.add_argument("--output", type=cli.new_folder, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: the source's)")
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=MAX_SHARD_SIZE,
        metavar="SIZE",
        help="largest file, such as 5GB (default: 50GB)",
    )
    parser.add_argument(
        "--tokenizer",
        type=cli.input_path,
        metavar="DIR",
        help="tokenizer of another vocabulary than GPT-2's: folder with tokenizer.json, or vocab.json and merges.txt",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what was found")
    parser.add_argument("--force", action="store_true", help="replace an older result of this command")
    arguments = parser.parse_args(argv)
    path, output, options, force = arguments.checkpoint, arguments.output, flags.options(arguments), arguments.force
    if arguments.dry_run:
        _open(path, output, options, arguments.tokenizer, force)
    else:
        how = {"dtype": arguments.dtype, "max_shard_size": arguments.max_shard_size, "tokenizer": arguments.tokenizer}
        print(merge(path, output, options=options, **how, force=force))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
