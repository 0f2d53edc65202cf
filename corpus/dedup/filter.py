"""Phase 5, one job per shard: the survivors, and the documents that were removed, each with its survivor's id."""

from itertools import pairwise
from pathlib import Path

import numpy as np

from common.errors import InputError
from common.files import BadLines, document_writer, read_documents, shard_stem
from common.stats import Stats
from corpus.dedup.segments import Segments
from corpus.runner import Drop, Step


def filter_shard(shard: Path, clusters: Path, output_dir: Path) -> Stats:
    """Write the survivors of a shard, and under `removed` the others, in order.

    One process: sending a document to another takes longer than filtering it. Raises InputError when the shard has
    changed since its signatures were made.
    """
    removals = _removals(shard, clusters)
    survivors, removed = outputs_of(shard, output_dir)
    step = Step("dedup", [shard], removed, allow_empty=True)
    with step.results(document_writer(survivors)) as results:
        # phase 1 has reported the bad lines
        for index, document in enumerate(step.stats.counted(read_documents(shard, BadLines(1.0)))):
            if (removal := removals.pop(index, None)) is None:
                results.settle(document)
            else:
                survivor, reason = removal
                results.settle(Drop({**document, "survivor": survivor}, reason))
        if removals:
            raise InputError(f"{shard}: shorter than its signatures; run the phase `signatures` again")
    return step.stats


def _removals(shard: Path, clusters: Path) -> dict[int, tuple[str, str]]:
    """The removed documents of a shard by their index: the survivor's id, and the reason."""
    name = shard_stem(shard)
    with Segments(clusters) as file:
        indices = file.read(f"{name}/removed", "<i8").tolist()
        exact = file.read(f"{name}/exact", "u1").tolist()
        ids = file.read(f"{name}/ids", "u1").tobytes()
        ends = np.cumsum(file.read(f"{name}/ids_length", "<i8")).tolist()
    survivors = [ids[start:end].decode() for start, end in pairwise([0, *ends])]
    reasons = ["exact" if same else "near" for same in exact]
    return dict(zip(indices, zip(survivors, reasons, strict=True), strict=True))


def outputs_of(shard: Path, output_dir: Path) -> tuple[Path, Path]:
    """The files for the survivors of a shard and for its removed documents."""
    name = f"{shard_stem(shard)}.jsonl.zst"
    return output_dir / name, output_dir / "removed" / name
