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


def test_the_report_has_everything_and_a_changed_file_is_noticed(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "merged"
    weights = run / "mp_rank_00" / "weights"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    folder.mkdir()
    source = source_of(truth(), path=run, iteration=7, notes=("heads are assumed",))
    written = write_folder(folder, source, dtype=torch.float16, max_shard_size=40_000)
    name = "h.3.ln_1.bias"
    drifted = (Drift(name, "tensor rank 1", 2, 0.5), Drift(name, "tensor rank 2", 1, math.nan))
    proof = {"tokens": 512, "largest_difference": 1e-6}
    findings = Findings(hash_files([weights]), Replicas(9, drifted), proof, torch.float16, notes=("moments are left",))
    write_report(folder, source, findings, written)
    write_origin(folder, Origin(iteration=7), written)
    report = json.loads((folder / "merge_report.json").read_text())
    assert (report["source"]["path"], report["source"]["iteration"]) == (str(run), 7)
    assert report["source"]["files"] == {"mp_rank_00/weights": digest(weights)}
    assert (report["model"]["n_layer"], report["model"]["dtype"]) == (SMALL.n_layer, "float16")
    one, two = report["replicas"].pop("drifted")[name].values()
    assert report["replicas"] == {"compared": 9, "equal": 7}
    assert one == {"elements": 2, "largest_difference": 0.5} and two == {"elements": 1, "largest_difference": "nan"}
    assert report["proof"] == proof and report["notes"] == ["heads are assumed", "moments are left"]
    others = {"merge_report.json", "training.json"}
    assert report["output"] == {path.name: digest(path) for path in folder.iterdir() if path.name not in others}
    origin = read_origin(folder)
    assert origin is not None and (origin.iteration, origin.split) == (7, None)
    assert first_changed_file(folder) is None
    shard = next(folder.glob("model-00002-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    assert first_changed_file(folder) == shard
