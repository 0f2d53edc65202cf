"""The folder of convert.merge_mp: Hugging Face's, with proof, model card, report and hashes."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import page
from common.console import warn
from common.files import digest, write_json, write_text
from common.progress import Meter
from common.run_card import versions
from convert.assemble import widest_dtype
from convert.proof import Proof, prove, source_outputs
from convert.sources.consistency import ReplicaComparison, compare_replicas
from convert.sources.source import Source
from convert.targets.huggingface import tokenizer_of, write_folder
from training.huggingface.origin import REPORT, VOCABULARIES, Origin, write_origin

_VERSIONS = ("urls-to-gpt2", "torch", "python")


def write(source: Source, folder: Path, *, dtype: str | None, max_shard_size: int) -> tuple[str, Proof]:
    """Write and prove the folder, which is empty; returns a description, and the proof.

    Hashes and compares the source's files concurrently, so each file is read from disk once.
    """
    kept: torch.dtype = getattr(torch, dtype) if dtype else widest_dtype(source)
    name = str(kept).removeprefix("torch.")
    unknown = [path for path in sorted(set(source.files)) if path not in source.hashes]
    total = sum(path.stat().st_size for path in unknown) + source.model.parameters * kept.itemsize
    one_thread = partial(torch.set_num_threads, 1)  # more would wait for each other and the writer at every product
    with Meter("convert.merge_mp", "bytes", total) as meter, ThreadPoolExecutor(2, initializer=one_thread) as pool:

        def count(size: int) -> None:
            meter.advance(size, size)

        expecting = pool.submit(source_outputs, source, kept)
        hashing = {path: pool.submit(_hash, path, count) for path in unknown}
        comparing = pool.submit(compare_replicas, source)
        try:
            weights = write_folder(folder, source, dtype=kept, max_shard_size=max_shard_size, progress=count)
            proof = pool.submit(prove, source, expecting.result(), folder).result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        read = {**source.hashes, **{path: entry.result() for path, entry in hashing.items()}}
        replicas = comparing.result()

    known: dict[str, Any] = {"samples": source.consumed_samples, "split": source.facts.get("split")}
    known |= asdict(source.model) | {"iteration": source.iteration, "parameters": source.model.parameters}
    write_text(folder / "README.md", page.render("training.huggingface", "model_card.md", **known) + "\n")
    written = {path.name: weights.get(path.name) or digest(path) for path in sorted(folder.iterdir())}
    write_json(folder / REPORT, _report(source, name, read, replicas, proof, written))
    write_origin(folder, Origin.of_facts(source.iteration, source.consumed_samples, source.facts), weights)
    if replicas.drifted:
        warn(f"{source.path}: {replicas}; merge_report.json has all")
    vocabulary = f"vocabulary {source.model.vocab_size}, {_tokenizer_in(folder, source)} tokenizer"
    return f"merged from {source.path}, {vocabulary}, {name}; {replicas}", proof


def _hash(path: Path, count: Callable[[int], None]) -> dict[str, Any]:
    entry = digest(path)
    count(entry["size"])
    return entry


def _report(
    source: Source,
    dtype: str,
    read: Mapping[Path, Any],
    replicas: ReplicaComparison,
    proof: Proof,
    written: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of merge_report.json; docs/convert.md explains it."""
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
                for path, entry in read.items()
            },
            "facts": source.facts,
        },
        "model": asdict(source.model) | {"dtype": dtype},
        "replicas": replicas.report(),
        "proof": asdict(proof),
        "notes": source.notes,
        "versions": {name: used.get(name, "unknown") for name in _VERSIONS},
        "output": written,
    }


def _tokenizer_in(folder: Path, source: Source) -> str:
    if not any((folder / name).exists() for name in VOCABULARIES):
        return "without"
    return "with GPT-2's" if tokenizer_of(source) != source.tokenizer else "with its own"
