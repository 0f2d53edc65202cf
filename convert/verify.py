"""Check a checkpoint of any origin, or a merged folder, without converting it.

    python -m convert.verify results/demo/models/tiny
    python -m convert.verify merged/gpt2-345m
    python -m convert.verify megatron/gpt2-345m

Compares every checksum that the folder has (manifest.json, training.json, the CRC32 in .pt and
.distcp files), reads every tensor, checks shapes and ranks, and compares the copies that several
ranks hold. Prints the origin and layout, and "whole". Otherwise exits with code 2, and one line
names what is damaged, missing or copied. Writes nothing.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from zipfile import ZipFile, is_zipfile

from common import cli
from convert.arguments import Options, add_options, options_of
from convert.command import SOURCE


def check(path: Path, options: Options | None = None) -> Iterator[str]:
    """Yields lines about the checkpoint, the last when all is compared; raises for any damage."""
    from convert.assemble import check_parts
    from convert.sources.consistency import compare_replicas
    from convert.sources.find import open_source
    from convert.sources.source import row_bands
    from convert.targets.huggingface import check_tokenizer
    from training.checkpoint.manifest import MANIFEST
    from training.huggingface.origin import check_files
    from training.model_folder import checkpoint_folders

    saves = checkpoint_folders(path) if path.is_dir() else []
    # the last save of a run of ours, even if only an older one is whole
    source = open_source(saves[0] if any((save / MANIFEST).exists() for save in saves) else path, options)
    yield f"{source.path}: {source.layout}"
    yield from (f"  {note}" for note in (*source.notes, check_tokenizer(source)) if note)
    iteration = "unknown" if source.iteration is None else source.iteration
    files = set(source.files)
    size = sum(file.stat().st_size for file in files) / 1e9
    yield f"  iteration {iteration}, {source.model.parameters:,} parameters, {len(files)} files, {size:.1f} GB"
    hashed = {*source.hashes, *check_files(source.path)}
    for name in source.tensors:
        check_parts(source, name)
    for tensor in chain.from_iterable(kind.values() for kind in (source.tensors, *source.moments.values())):
        for _ in row_bands(tensor):
            pass  # reading the first tensor of a file compares the whole file with its checksums
    replicas = compare_replicas(source)
    if unknown := sorted(str(file) for file in files - hashed if _has_no_checksum(file)):
        yield f"  without a checksum, so that only sizes and shapes were compared: {', '.join(unknown)}"
    yield f"  whole; {replicas}"


def _has_no_checksum(file: Path) -> bool:
    """Whether a file of weights has data without a CRC32."""
    if file.suffix not in (".pt", ".bin") or not is_zipfile(file):
        return file.suffix in (".safetensors", ".pt", ".bin")
    with ZipFile(file) as archive:
        return any(member.file_size and not member.CRC for member in archive.infolist())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.verify", __doc__)
    parser.add_argument("checkpoint", type=cli.checkpoint_path, metavar="FOLDER", help=SOURCE)
    add_options(parser)
    arguments = parser.parse_args(argv)
    for line in check(arguments.checkpoint, options_of(arguments)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
