"""Checkpoints of other versions of the toolkit are read if possible, and refused by key if not."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError
from common.files import read_json, write_json
from tests.training.helpers import make_run, run_main
from training import checkpoint
from training.checkpoint import versions
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


def change(folder: Path, section: str, **values: Any) -> None:
    """Change values in a section of a manifest; None removes a key."""
    raw = read_json(folder / "manifest.json")
    target = raw[section] if section else raw
    target |= values
    for key in [key for key, value in values.items() if value is None]:
        del target[key]
    write_json(folder / "manifest.json", raw)


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


def test_new_removed_and_renamed_keys_do_not_matter(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.RENAMED, ("train", "grandfathers_split"), "split")
    monkeypatch.setitem(versions.BEFORE, ("train", "lr_decay"), "linear")
    change(old, "", mood="glad", topology=None, replicas=None)
    change(old, "train", grandfathers_split="80,20,0", split=None, lr_decay=None, keep_every=None, momentum=0.5)
    change(old, "train", betas=[0.9, 1.5], warmup_iterations=99)  # valid in the version that wrote it
    change(old, "parallel", expert=4, offload=None)
    run = checkpoint.resolve(old).experiment
    assert (run.train.split, run.train.lr_decay, run.train.keep_every) == ("80,20,0", "linear", 0)


@pytest.mark.parametrize(
    ("section", "values"), [("", {"format": 2}), ("model", {"rotary": True})], ids=["format", "model.rotary"]
)
def test_a_newer_format_stops_a_run_even_if_it_has_an_older_checkpoint(
    old: Path, section: str, values: dict[str, Any]
) -> None:
    newer = old.with_name("iter_0000005")
    old.rename(newer)
    shutil.unpack_archive(FORMAT_1, old.parent)
    change(newer, section, **values)
    for path in (newer, old.parent):
        with pytest.raises(CheckpointError, match=rf"iter_0000005/manifest\.json: .*{next(iter(values))}"):
            checkpoint.resolve(path)


def test_a_damaged_manifest_gives_one_line(old: Path) -> None:
    change(old, "model", n_layer=None)
    without_a_key = (old / "manifest.json").read_text()
    for text in ("[]", "{", "", '{"format": "1"}', "\xff", '{"format": 1, "iteration": "x"}', without_a_key):
        (old / "manifest.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=r"manifest\.json[^\n]*\Z"):
            checkpoint.read_manifest(old)
