"""merge_report.json says what was merged, and the hashes of both sides."""

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
import xxhash

from convert.merge_report import Findings, hash_files, write_report
from convert.replicas import Drift, Replicas
from convert.targets.huggingface import write_folder
from tests.convert.encoded import SMALL, truth
from tests.convert.helpers import source_of
from training.huggingface.origin import Origin, digest, first_changed_file, read_origin, write_origin


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("empty", "small", "large")]
    for path, size in zip(paths, (0, 7, (1 << 20) + 3), strict=True):
        path.write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    done: list[int] = []
    found = hash_files(paths, done.append)
    for path in paths:
        with path.open("rb") as file:
            expected = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        assert found[path] == {"size": path.stat().st_size, "xxh3": expected} == digest(path)
    assert sum(done) == sum(path.stat().st_size for path in paths)
    with pytest.raises(OSError, match="absent"):
        hash_files([tmp_path / "absent"])


def test_the_report_has_everything_and_the_folder_can_be_replaced_safely(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "merged"
    (run / "mp_rank_00").mkdir(parents=True)
    folder.mkdir()
    (run / "mp_rank_00" / "weights").write_bytes(b"weights")
    source = source_of(truth(), path=run, iteration=7, notes=("heads are assumed",), facts={"torch": "1.0"})
    written = write_folder(folder, source, dtype=torch.float16, max_shard_size=40_000)
    drifted = (
        Drift("h.3.ln_1.bias", "tensor rank 1", 2, 0.5),
        Drift("h.3.ln_1.bias", "tensor rank 2", 1, math.nan),
    )
    findings = Findings(
        files=hash_files([run / "mp_rank_00" / "weights"]),
        replicas=Replicas(9, drifted),
        proof={"tokens": 512, "largest_difference": 1e-6},
        dtype=torch.float16,
        notes=("moments are left",),
    )
    write_report(folder, source, findings, written)
    write_origin(folder, Origin(iteration=7), written)
    report = json.loads((folder / "merge_report.json").read_text())
    assert report["source"] == {
        "path": str(run),
        "layout": "weights in memory",
        "iteration": 7,
        "consumed_samples": None,
        "files": {"mp_rank_00/weights": digest(run / "mp_rank_00" / "weights")},
        "facts": {"torch": "1.0"},
    }
    assert report["model"]["n_layer"] == SMALL.n_layer and report["model"]["dtype"] == "float16"
    assert report["replicas"] == {
        "compared": 9,
        "equal": 7,
        "drifted": {
            "h.3.ln_1.bias": {
                "tensor rank 1": {"elements": 2, "largest_difference": 0.5},
                "tensor rank 2": {"elements": 1, "largest_difference": "nan"},
            }
        },
    }
    assert report["proof"]["tokens"] == 512 and report["notes"] == ["heads are assumed", "moments are left"]
    assert report["versions"]["torch"] == torch.__version__ and len(report["versions"]) == 3
    others = {"merge_report.json", "training.json", "run.json"}
    assert report["output"] == {path.name: digest(path) for path in folder.iterdir() if path.name not in others}
    assert sum(name.startswith("model-") for name in report["output"]) > 2

    origin = read_origin(folder)
    assert origin is not None and (origin.iteration, origin.split) == (7, None)
    assert first_changed_file(folder) is None
    (folder / "model-00002-of-00003.bin").write_text("mine")
    assert first_changed_file(folder) == folder / "model-00002-of-00003.bin"
    (folder / "model-00002-of-00003.bin").unlink()
    shard = next(folder.glob("model-00002-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    assert first_changed_file(folder) == shard
