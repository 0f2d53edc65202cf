"""The files of a finished run, of any size, written without running anything."""

import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

from common.files import write_json
from common.stats import Stats

STEPS = {"pages": "scrape", "clean": "clean", "dedup": "dedup", "tokens": "tokenize"}
REASONS = {"scrape": {"timeout": 3, "http_404": 2}, "clean": {"short": 4}, "dedup": {"near": 5}}
_SOURCES = {name: {"documents": 45, "bytes": 900} for name in ("<a>", "b")}
EXTRA: dict[str, dict[str, Any]] = {
    "scrape": {
        "hosts": {f"h{host}.example": {"urls": 5, "ok": 5} for host in range(10)},
        "kept_by": {"host": {"h1.example": {"documents": 5, "bytes": 100}}},
    },
    "clean": {"languages": {"en": 90, "de": 6}, "kept_by": {"source": _SOURCES}},
    "tokenize": {
        "tokens": 40_000,
        "token_lengths": {"128": 50, "256": 30, "512": 4, "1024": 1},
        "kept_by": {
            "host": {f"h{host}.example": {"documents": 4 - host % 2, "bytes": 4 * 18 * 85} for host in range(10)}
        },
    },
}
COLUMNS = (
    "iteration,consumed_samples,consumed_tokens,learning_rate,lm_loss,grad_norm,ms_per_iteration,tokens_per_second"
)
BEGAN = 1_700_000_000


def finished_run(folder: Path, *, shards: int = 2, rows: int = 40, models: tuple[str, ...] = ("tiny",)) -> Path:
    """A run with every file that the report reads."""
    chance = random.Random(1)
    _stats(folder / "urls/stats.json", "blacklist", 100 * shards, {"duplicate": shards}, 1.0)
    _log(folder / "logs/blacklist.log", 1.0, BEGAN + 1)
    _stats(folder / "ingest/stats.json", "ingest", 1, {"binary": 1}, 1.0)
    _log(folder / "logs/dedup_bands/3.log", 4.0, BEGAN + 28)
    for number, (step_folder, step) in enumerate(STEPS.items()):
        for shard in range(shards):
            path = folder / step_folder / f"{shard:04d}.stats.json"
            seconds = 2 + chance.random()
            _stats(path, step, 100 - 5 * number, REASONS.get(step, {}), seconds, **EXTRA.get(step, {}))
            _log(folder / f"logs/{step}/{shard:04d}.log", seconds, BEGAN + 10 * (number + 1) + seconds)
    sets = {"lambada": {"hits": 3, "documents": 2, "ngrams": 9, "ignored": 0}}
    _stats(folder / "decontaminate/0000.stats.json", "decontaminate", 85 * shards, {}, 1.0, evaluation_sets=sets)
    done = 85 * shards
    _stats(folder / "dataset/stats.json", "merge_index", done, {}, 0.5, tokens=40_000 * shards)
    _log(folder / "logs/merge_index.log", 0.5, BEGAN + 60)
    largest = {"documents": 9, "lowest_similarity": 0.7123, "ids": ["a"]}
    dropped = {"id": "d", "url": "http://d.example/", "text": "a <copy>", "similarity": 0.81}
    near = [[dropped, {"id": "s", "text": "s text"}], [{"id": "s"}]]
    sizes = {"1": 300, "2": 4, "6": 1, "9": 1}
    write_json(folder / "dedup/clusters.json", {"cluster_sizes": sizes, "largest_cluster": largest, "near": near})
    (folder / "config.yaml").write_text(f"run: {folder}\nurls: [urls.txt]\ngenerate: {{prompt: 'Once <upon>'}}\n")
    write_json(folder / "run.json", {"commit": f"{'0123456789' * 4}-dirty"})
    for place, name in enumerate(models):
        _model(folder, name, rows, place)
    return folder


def _stats(path: Path, step: str, documents: int, reasons: dict[str, int], seconds: float, **extra: Any) -> None:
    kept = documents - sum(reasons.values())
    stats = Stats(step, documents, kept, 1000 * documents, 900 * kept, Counter(reasons), extra=extra)
    stats.sizes_in.update({9: documents // 2, 11: documents - documents // 2})
    stats.sizes_out.update({9: kept // 2, 11: kept - kept // 2})
    for reason in reasons:
        document = {"id": path.name, "url": "http://a.example/", "text": f"<b>{reason}</b> " * 20}
        file = {"origin": "texts/a.txt", "detail": "binary data"}  # as ingest drops a file
        stats.examples[reason].append(file if reason == "binary" else document)
    write_json(path, {**stats.as_dict(), "seconds": seconds})


def _log(path: Path, seconds: float, ended: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"done\nfinished after {seconds:.1f} s; largest process 512 MB\n")
    os.utime(path, (ended, ended))


def _model(folder: Path, name: str, rows: int, place: int) -> None:
    model = folder / "models" / name
    model.mkdir(parents=True)
    chance = random.Random(place)
    lines = [f"{COLUMNS},data_wait_ms,loss_scale,skipped,non_finite,tflops,mfu,memory_mb"]
    for row in range(1, rows + 1):
        iteration = 10 * row
        loss = 4 + 5 * math.exp(-5 * row / rows) + 0.1 * chance.random() + place
        norm = "nan" if row == 3 else f"{1 + chance.random():.4f}"
        start = f"{iteration},{8 * iteration},{1024 * iteration},{1e-3 * (1 - row / (rows + 1)):.6g},{loss:.6f},{norm}"
        lines.append(f"{start},80.5,{12000 + 100 * chance.random():.1f},0.1,1.0,0,0,0.02,{0.3 + place / 10:.3f},412.5")
    (model / "train.csv").write_text("\n".join(lines) + "\n")
    valid = [f"{10 * row},{80 * row},{4.5 + place + (row == 1)},90.0" for row in range(1, rows + 1, max(1, rows // 4))]
    (model / "valid.csv").write_text("\n".join(["iteration,consumed_samples,loss,perplexity", *valid]) + "\n")
    starts = f"iteration,time,processes\n0,{BEGAN + 61},2\n{10 * (rows // 2)},{BEGAN + 90},2\n"
    (model / "starts.csv").write_text(starts)
    parts = {"weights": 4e7, "gradients": 4e7, "optimizer": 8e7, "activations": 1e8, "context": 4e8}
    plan = {"text": "layout  one <process>", "layout": "tensor 2", "memory": parts, "memory_bytes": 2.6e8}
    plan["samples_per_epoch"] = 1000
    write_json(model / "plan.json", {**plan, "tokens_per_second": 15000.0, "seconds": 100.0})
    write_json(model / "run.json", {"host": "n1", "processes": 2, "device": "CPU"})
    write_json(model / "done.json", {"iteration": 10 * rows, "consumed_samples": 80 * rows, "valid_loss": 4.6})
    write_json(model / "test.json", {"loss": 4.37, "perplexity": 79.0})
    evaluation = {"loss": 4.51 + place, "perplexity": 90.017, "bits_per_byte": 2.52, "tokens": 14784, "documents": 34}
    figures = ("lambada_openai", "acc", 0.3125, 0.0065, 5153), ("wikitext", "word_perplexity", 37.37, None, 62)
    tasks = [dict(zip(("task", "metric", "value", "stderr", "samples"), row, strict=True)) for row in figures]
    write_json(folder / "evaluation" / f"{name}.json", {**evaluation, "part": "valid", "tasks": tasks})
    (folder / "samples").mkdir(exist_ok=True)
    sources = "1 of 3 8-grams stand in the training data (33.3%)\n8 tokens ' <b>time': https://a.example/x, first read"
    text = f"Once <upon> a <b>time</b> there was.\n--- sources: {sources} in iteration 7\n"
    (folder / "samples" / f"{name}.txt").write_text(text)
    hashes = {"model.safetensors": {"size": 8551096, "xxh3": "xxh3_of_the_weights"}}
    proof = {"tokens": 64, "largest_difference": 6.7e-6, "relative_difference": 4.8e-7, "tolerance": 1e-4}
    merged = {
        "source": {"path": f"models/{name}", "layout": "tensor 2 used", "iteration": 10 * rows, "consumed_samples": 80},
        "model": {"n_layer": 2, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 2048, "tied": True},
        "replicas": {"compared": 3, "equal": 3},
        "proof": proof,
        "versions": {"torch": "9.9.9"},
        "output": hashes,
    }
    write_json(folder / "merged" / name / "merge_report.json", merged)
    write_json(folder / "merged" / name / "training.json", {"files": hashes})
    os.utime(model / "done.json", (BEGAN + 100, BEGAN + 100))
    for step, ended in (("merge", 104), ("evaluate", 109), ("generate", 110)):
        _log(folder / f"logs/{step}/{name}.log", 4.0, BEGAN + ended)
