"""Phase 5, a job a shard: the survivors, and the documents that were removed, each with its survivor's id."""

from itertools import pairwise
from pathlib import Path

import numpy as np

from common.errors import InputError
from common.files import BadLines, document_writer, read_documents, reject_writer
from common.stats import Stats
from corpus.dedup.segments import Segments


def filter_shard(shard: Path, clusters: Path, output_dir: Path) -> Stats:
    """Write the survivors of a shard, and under `removed` the others, in order.

    Raises InputError when the shard has changed since it was described.
    """
    stats = Stats("dedup")
    removals = _removals(shard, clusters)
    survivors, removed_from = outputs_of(shard, output_dir)
    with document_writer(survivors) as keep, reject_writer(removed_from, "dedup") as remove:
        # A bad line was skipped and counted when the shard was described.
        for place, document in enumerate(stats.counted(read_documents(shard, BadLines(1.0)))):
            if (removal := removals.pop(place, None)) is None:
                stats.keep(document)
                keep(document)
            else:
                removed = {**document, **removal}
                stats.drop(removal["reason"], removed)
                remove(removed)
        if removals:
            raise InputError(f"{shard}: shorter than when it was described; run the phase `signatures` again")
    return stats


def _removals(shard: Path, clusters: Path) -> dict[int, dict[str, str]]:
    """By its place in the shard, what is noted of each document that is removed."""
    name = shard_name(shard)
    with Segments(clusters) as file:
        places = file.read(f"{name}/removed", "<i8").tolist()
        exact = file.read(f"{name}/exact", "u1").tolist()
        ids = file.read(f"{name}/ids", "u1").tobytes()
        ends = np.cumsum(file.read(f"{name}/ids_length", "<i8")).tolist()
    survivors = [ids[start:end].decode() for start, end in pairwise([0, *ends])]
    reasons = ["exact" if same else "near" for same in exact]
    found = zip(places, survivors, reasons, strict=True)
    return {place: {"survivor": survivor, "reason": reason} for place, survivor, reason in found}


def outputs_of(shard: Path, output_dir: Path) -> tuple[Path, Path]:
    """Where the survivors of a shard go, and the others."""
    name = f"{shard_name(shard)}.jsonl.zst"
    return output_dir / name, output_dir / "removed" / name


def shard_name(path: Path) -> str:
    """`0017` of `0017.jsonl.zst`."""
    return path.name.split(".jsonl")[0]
