"""Checkpoints are complete or absent, hold no vocabulary padding, and are refused where they do not
fit.
"""

import os
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from common.config import load_settings
from common.errors import CheckpointError
from common.files import read_json, write_json
from common.settings import Experiment
from tests.training.checkpoint.planted import flip_a_bit, spoil
from tests.training.helpers import (
    ALONE,
    Session,
    byte_documents,
    make_run,
    make_session,
    open_session,
    plan_of,
    save_checkpoint,
    train_steps,
    write_corpus,
)
from training import checkpoint
from training.checkpoint import Manifest, Progress, parts
from training.dataset.blend import Blend
from training.dataset.corpus import Corpus, Samples
from training.planning.run import Plan


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """A tiny model after two steps."""
    session = make_session(tmp_path)
    train_steps(session, 2)
    return session


def save(session: Session, folder: Path, iteration: int = 2, **state: Any) -> Manifest:
    progress = Progress(iteration, 8 * iteration, **state)
    path = save_checkpoint(folder, session.parameters, session.optimizer, progress, session.plan)
    return checkpoint.read_manifest(path)


def check_fits(manifest: Manifest, plan: Plan) -> None:
    checkpoint.check_fits(manifest, name=plan.name, experiment=plan.experiment, data=plan.data.train)


@pytest.mark.parametrize("large", [False, True], ids=["one file", "several files"])
def test_weights_moments_and_position_come_back_bit_for_bit(
    session: Session, tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(parts, "_MIN_FILE", 1 << 15)
    memory = {"losses": [5.5, 5.25], "skipped": 1, "loss_scale": {"scale": 65536.0}}
    manifest = save(session, tmp_path / "run", guard=memory)
    assert manifest.progress == Progress(2, 16, memory)
    assert (len(list(manifest.path.glob("*.safetensors"))) > 4) == large
    for name, entry in manifest.files.items():
        data = (manifest.path / name).read_bytes()
        assert entry == {"size": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
    other = open_session(session.plan, ALONE)
    checkpoint.load(manifest, other.parameters, other.optimizer)
    assert session.parameters["wte.weight"].shape[0] == 384
    for name, mine in session.parameters.items():
        theirs = other.parameters[name]
        rows = 257 if name == "wte.weight" else None  # padding is not in the files
        assert torch.equal(mine[:rows], theirs[:rows]), name
        for key, value in session.optimizer.state[mine].items():
            assert torch.equal(value, other.optimizer.state[theirs][key]), (name, key)
    assert torch.equal(checkpoint.load_weights(manifest)["wpe.weight"], session.parameters["wpe.weight"])
    stored = read_json(manifest.path / "tensors.json")
    assert [stored[f"{part}.wte.weight"]["shape"] for part in ("model", "exp_avg", "exp_avg_sq")] == [[257, 32]] * 3
    assert [part["shape"] for part in stored["model.wte.weight"]["parts"]] == [[257, 32]]


def test_a_checkpoint_is_plain_data_and_an_index_that_was_changed_is_refused_in_one_line(
    session: Session, tmp_path: Path
) -> None:
    manifest = save(session, tmp_path / "run")
    assert {path.suffix for path in manifest.path.iterdir()} == {".json", ".safetensors"}  # no pickle
    index = read_json(manifest.path / "tensors.json")
    changes = [("file", "../other.safetensors"), ("file", "manifest.json"), ("shape", [1, 1]), ("offset", [0, -1])]
    for key, value in [*changes, ("offset", [1, 0]), ("parts", []), ("parts", "x")]:
        changed = deepcopy(index)
        entry = changed["model.wpe.weight"]
        (entry if key == "parts" else entry["parts"][0])[key] = value
        write_json(manifest.path / "tensors.json", changed)
        for use in (checkpoint.load_weights, lambda it: checkpoint.load(it, session.parameters, session.optimizer)):
            with pytest.raises(CheckpointError, match=r"iter_0000002/(tensors\.json|rank_0_0.*): [^\n]*\Z"):
                use(manifest)


def test_a_newer_format_stops_a_run_even_if_it_has_an_older_checkpoint(session: Session, tmp_path: Path) -> None:
    save(session, tmp_path, 2)
    newer = save(session, tmp_path, 4).path
    write_json(newer / "manifest.json", read_json(newer / "manifest.json") | {"format": 3})
    for path in (newer, tmp_path):
        with pytest.raises(CheckpointError, match=r"iter_0000004/manifest\.json: format 3"):
            checkpoint.resolve(path)


def test_a_setting_that_this_version_lacks_is_ignored_unless_it_was_set(session: Session, tmp_path: Path) -> None:
    save(session, tmp_path, 2)
    path = save(session, tmp_path, 4).path / "manifest.json"
    content = read_json(path)
    assert "train.eps" not in content["given"] and "train.iterations" in content["given"]
    write_json(path, content | {"train": content["train"] | {"dropped": 3}})
    assert checkpoint.resolve(tmp_path).progress == Progress(4, 32)
    write_json(path, read_json(path) | {"given": [*content["given"], "train.dropped"]})
    with pytest.raises(CheckpointError, match=r"iter_0000004/manifest\.json: train\.dropped is set.* older"):
        checkpoint.newest(tmp_path)


def test_a_damaged_manifest_gives_one_line(session: Session, tmp_path: Path) -> None:
    folder = save(session, tmp_path).path
    without_a_key = (folder / "manifest.json").read_text().replace('"n_layer": 2,', "")
    for text in ("[]", "{", "", '{"format": "1"}', "\xff", '{"format": 2, "iteration": "x"}', without_a_key):
        (folder / "manifest.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=r"manifest\.json[^\n]*\Z"):
            checkpoint.read_manifest(folder)


def test_every_byte_is_on_the_disk_and_the_manifest_written_last_before_a_checkpoint_gets_its_name(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str, int]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(("fsync", os.path.basename(path), os.fstat(descriptor).st_size))
        fsync(file)

    def noted_rename(source: Any, target: Any, **options: Any) -> None:
        if Path(source).is_dir():
            events.append(("rename", Path(target).name, 0))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    manifest = save(session, tmp_path / "run")
    named = events.index(("rename", "iter_0000002", 0))
    written = [event for event in events[:named] if event[0] == "fsync"]
    for name, entry in manifest.files.items():
        assert any(event[1].startswith(name) and event[2] == entry["size"] for event in written), name
    last = [event[1] for event in written if event[2] and "iter_" not in event[1]][-1]
    assert last.startswith("manifest.json")
    assert any(event[:2] == ("fsync", "run") for event in events[named:]), "the folder with the new name"
    latest = next(number for number, event in enumerate(events) if event[1].startswith("latest"))
    assert latest > named and (tmp_path / "run/latest").read_text() == "iter_0000002\n"


@pytest.mark.parametrize("damage", ["no manifest", "file missing", "byte flipped", "file truncated"])
def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(
    session: Session, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(session, tmp_path, 2)
    newest = save(session, tmp_path, 4).path
    spoil(newest, damage)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.path.name == "iter_0000002"
    assert "iter_0000004" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="iter_0000004"):
        checkpoint.resolve(newest)
    assert checkpoint.resolve(tmp_path).path.name == "iter_0000002"


def test_each_rank_verifies_a_share_of_the_files_and_what_breaks_later_is_one_line(
    session: Session, tmp_path: Path
) -> None:
    manifest = save(session, tmp_path)
    second = sorted(manifest.files)[1]
    flip_a_bit(manifest.path / second)
    checkpoint.verify(manifest, slice(0, None, 2))
    with pytest.raises(CheckpointError, match=second):
        checkpoint.verify(manifest, slice(1, None, 2))
    next(manifest.path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"iter_0000002/[^\n]*\Z"):
        checkpoint.load(manifest, session.parameters, session.optimizer)


def test_a_moved_model_folder_still_has_its_vocabulary(session: Session, tmp_path: Path) -> None:
    originals = {"encoder_json": tmp_path / "elsewhere.json", "vocab_bpe": tmp_path / "elsewhere.bpe"}
    for key, path in originals.items():
        path.write_text(key)
    session.plan = replace(session.plan, tokenize=session.plan.tokenize.model_copy(update=originals))
    path = save(session, tmp_path / "run").path
    for original in originals.values():
        original.unlink()
    (tmp_path / "run").rename(tmp_path / "moved")
    found = checkpoint.resolve(tmp_path / "moved" / path.name).tokenize
    assert found.encoder_json == tmp_path / "moved" / "tokenizer" / "encoder.json"
    assert [getattr(found, key).read_text() for key in originals] == list(originals)


def test_other_model_settings_are_refused_by_key(session: Session, tmp_path: Path) -> None:
    manifest = save(session, tmp_path)
    check_fits(manifest, session.plan)
    for section, key, value in (("model", "n_layer", 3), ("train", "seed", 7), ("train", "split", "1,1,1")):
        run = session.plan.experiment.model_dump()
        was, run[section][key] = run[section][key], value
        other = replace(session.plan, experiment=Experiment.model_validate(run))
        with pytest.raises(CheckpointError, match=rf"models\.tiny\.{section}\.{key} is {value} .* {was}"):
            check_fits(manifest, other)


@pytest.mark.parametrize("vocab_size", [257, None], ids=["ours", "another tool's"])
def test_another_text_in_documents_of_the_same_lengths_is_refused(tmp_path: Path, vocab_size: int | None) -> None:
    config = make_run(tmp_path)
    prefix = load_settings(config).dataset_prefix
    write_corpus(prefix, byte_documents(60), vocab_size)
    if vocab_size is None:
        prefix.with_name(prefix.name + ".json").unlink(missing_ok=True)
    plan = plan_of(config)
    manifest = save(open_session(plan, ALONE), tmp_path / "run")
    check_fits(manifest, plan_of(config))
    shutil.copytree(prefix.parent, tmp_path / "elsewhere")
    moved = Samples(Corpus.open(tmp_path / "elsewhere" / prefix.name), range(54), 8)
    check_fits(manifest, replace(plan, data=plan.data._replace(train=Blend([moved], [1]))))
    documents = byte_documents(60)
    documents[7][3] ^= 1
    write_corpus(prefix, documents, vocab_size)
    with pytest.raises(CheckpointError, match="iter_0000002"):
        check_fits(manifest, plan_of(config))
