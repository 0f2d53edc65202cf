"""Checkpoints of other versions of the toolkit are read if possible, and refused by key if not."""

import shutil
from pathlib import Path

import pytest

from common.errors import CheckpointError
from common.files import read_json, write_json
from tests.training.helpers import make_run, run_main
from training import checkpoint
from training.train import main

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8}
FORMAT_1 = Path(__file__).parent / "stored/format_1.zip"
TRAIN = {"iterations": 6, "micro_batch_size": 2, "global_batch_size": 2, "log_interval": 4}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of format 1 as its version wrote it, in a model folder beside its corpus."""
    make_run(tmp_path, model=TINY, train=TRAIN)
    shutil.unpack_archive(FORMAT_1, tmp_path / "models/tiny")
    return tmp_path / "models/tiny/iter_0000004"


def test_a_run_resumes_from_a_checkpoint_of_format_1(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = checkpoint.resolve(old.parent)
    assert (manifest.progress.iteration, manifest.experiment.model.n_embd) == (4, 8)
    assert (manifest.experiment.train.split, manifest.experiment.train.keep_every) == ("90,10,0", 0)
    assert checkpoint.load_weights(manifest)["wte.weight"].shape == (257, 8)
    assert run_main(main, "--config", old.parents[2] / "config.yaml", "--model", "tiny") == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and str(old) in said.err  # its text was not compared
    assert f"resumed from {old}" in said.out
    assert read_json(old.parent / "iter_0000006/manifest.json")["content"][0].startswith("xxh3:")


@pytest.mark.parametrize("key", ["format", "rotary"])
def test_a_newer_format_stops_a_run_even_if_it_has_an_older_checkpoint(old: Path, key: str) -> None:
    newer = old.with_name("iter_0000005")
    old.rename(newer)
    shutil.unpack_archive(FORMAT_1, old.parent)
    manifest = read_json(newer / "manifest.json")
    (manifest if key == "format" else manifest["model"])[key] = 2
    write_json(newer / "manifest.json", manifest)
    for path in (newer, old.parent):
        with pytest.raises(CheckpointError, match=rf"iter_0000005/manifest\.json: .*{key}"):
            checkpoint.resolve(path)


def test_a_damaged_manifest_gives_one_line(old: Path) -> None:
    without_a_key = (old / "manifest.json").read_text().replace('"n_layer": 1,', "")
    for text in ("[]", "{", "", '{"format": "1"}', "\xff", '{"format": 1, "iteration": "x"}', without_a_key):
        (old / "manifest.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=r"manifest\.json[^\n]*\Z"):
            checkpoint.read_manifest(old)
