"""Checkpoints of this toolkit, of any layout: whole tensors in blocks, as the ranks wrote them."""

from pathlib import Path

from common.errors import CheckpointError
from convert.arguments import Options
from convert.sources.ranks import check_complete, qkv_order
from convert.sources.source import Architecture, Sharded, Source
from training import checkpoint
from training.checkpoint.manifest import MANIFEST
from training.checkpoint.parts import open_blocks, read_index
from training.inference.load import origin_in, tokenizer_for
from training.moments import ADAMW
from training.region import Region


def matches(folder: Path) -> bool:
    """Whether `folder` is one of our checkpoints, complete or not."""
    return (folder / MANIFEST).exists()


def open_folder(folder: Path, options: Options) -> Source:
    """One of our checkpoints, its files compared with the manifest's checksums."""
    manifest = checkpoint.resolve(folder)
    settings, parallel, progress = manifest.experiment.model, manifest.experiment.parallel, manifest.progress
    if options.num_heads is not None and options.num_heads != settings.n_head:
        raise CheckpointError(f"{folder}: has {settings.n_head} heads; leave --num-heads out")
    index = read_index(manifest)
    blocks = open_blocks(manifest, index, {key: Region.whole(entry.shape) for key, entry in index.items()})
    stored = {key: Sharded(entry.shape, blocks[key]) for key, entry in index.items()}

    def under(prefix: str) -> dict[str, Sharded]:
        return {key.removeprefix(prefix): tensor for key, tensor in stored.items() if key.startswith(prefix)}

    tensors = under("model.")
    check_complete(tensors)
    model = Architecture(
        n_layer=settings.n_layer,
        n_head=settings.n_head,
        n_embd=settings.n_embd,
        n_positions=settings.seq_len,
        n_inner=4 * settings.n_embd,
        vocab_size=settings.vocab_size,
        dropout=settings.dropout,
    )
    layout = f"data {parallel.data} x tensor {parallel.tensor} x pipeline {parallel.pipeline}"
    return Source(
        path=folder,
        layout=f"this toolkit, {settings.n_layer} layers, {layout}, ZeRO {parallel.zero_stage}",
        model=model,
        qkv=qkv_order(3, options, 1, what="this toolkit's version"),
        tensors=tensors,
        files=tuple(folder / name for name in (*manifest.files, MANIFEST)),
        hashes={folder / name: entry for name, entry in manifest.files.items() if "xxh3" in entry},
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        notes=(manifest.replicas.warning(),) if manifest.replicas.drifted else (),
        moments={moment: under(f"{moment}.") for moment in ADAMW},
        step=round(float(stored["step"].read())),
        tokenizer=tokenizer_for(manifest),
        facts=origin_in(manifest).facts,
    )
