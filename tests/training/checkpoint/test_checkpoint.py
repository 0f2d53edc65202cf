"""Checkpoints are complete or absent, hold no vocabulary padding, and are refused where they do not fit."""

import hashlib
import os
import shutil
from dataclasses import replace
from io import BytesIO
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from common.config import load_settings
from common.errors import CheckpointError
from common.files import read_json, write_json
from common.settings import Experiment
from tests.training.helpers import (
    Session,
    byte_documents,
    launch_ok,
    make_run,
    open_session,
    save_checkpoint,
    settings_of,
    step_batches,
    write_corpus,
)
from tests.training.worker import steps
from training import checkpoint
from training.checkpoint import Manifest, Progress, storage
from training.checkpoint.metadata import read_metadata
from training.dataset.blend import Blend
from training.dataset.corpus import Corpus, Samples
from training.model_folder import checkpoint_folders
from training.parallel.process_group import World
from training.run_plan import Plan, make_plan
from training.step import train_step

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """A tiny model after two steps."""
    session = open_session(make_plan(settings_of(make_run(tmp_path)), "tiny"), ALONE)
    for iteration, batches in enumerate(islice(step_batches(session, 0), 2), start=1):
        train_step(session, iteration, batches, 0.01)
    return session


def save(session: Session, folder: Path, iteration: int = 2) -> Manifest:
    progress = Progress(iteration, 8 * iteration)
    return checkpoint.read_manifest(
        save_checkpoint(folder, session.parameters, session.optimizer, progress, session.plan)
    )


def check_fits(manifest: Manifest, plan: Plan) -> str:
    return checkpoint.check_fits(manifest, name=plan.name, experiment=plan.experiment, data=plan.data.train)


def test_weights_moments_and_position_come_back_bit_for_bit(session: Session, tmp_path: Path) -> None:
    manifest = save(session, tmp_path / "run")
    other = open_session(session.plan, ALONE)
    checkpoint.load(manifest, other.parameters, other.optimizer)
    assert manifest.progress == Progress(2, 16)
    for name, mine in session.parameters.items():
        theirs = other.parameters[name]
        rows = 257 if name == "wte.weight" else None
        assert torch.equal(mine[:rows], theirs[:rows]), name
        for key, value in session.optimizer.state[mine].items():
            assert torch.equal(value, other.optimizer.state[theirs][key]), (name, key)
    assert torch.equal(checkpoint.load_weights(manifest)["wpe.weight"], session.parameters["wpe.weight"])


def test_padding_rows_are_not_in_the_files(session: Session, tmp_path: Path) -> None:
    assert session.parameters["wte.weight"].shape[0] == 384
    manifest = save(session, tmp_path / "run")
    stored = FileSystemReader(manifest.path).read_metadata().state_dict_metadata
    for key in ("model.wte.weight", "exp_avg.wte.weight", "exp_avg_sq.wte.weight"):
        assert stored[key].size == torch.Size((257, 32)), key


def test_the_latest_file_names_the_newest_checkpoint(session: Session, tmp_path: Path) -> None:
    save(session, tmp_path, 2)
    save(session, tmp_path, 4)
    assert (tmp_path / "latest").read_text() == "iter_0000004\n"
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["iter_0000004", "iter_0000002"]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("damage", ["no manifest", "file missing", "byte flipped", "file truncated"])
def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(
    session: Session, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(session, tmp_path, 2)
    newest = save(session, tmp_path, 4).path
    file = next(newest.glob("*.distcp"))
    data = file.read_bytes()
    if damage == "no manifest":
        (newest / "manifest.json").unlink()
    elif damage == "file missing":
        file.unlink()
    elif damage == "byte flipped":
        file.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    else:
        file.write_bytes(data[:-1])
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.path.name == "iter_0000002"
    assert "iter_0000004" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="iter_0000004"):
        checkpoint.resolve(newest)
    assert checkpoint.resolve(tmp_path).path.name == "iter_0000002"


def test_a_manifest_holds_the_guards_state_and_loads_without_it(session: Session, tmp_path: Path) -> None:
    memory = {"losses": [5.5, 5.25], "skipped": 1, "loss_scale": {"scale": 65536.0}}
    path = save_checkpoint(tmp_path, session.parameters, session.optimizer, Progress(2, 16, memory), session.plan)
    assert checkpoint.read_manifest(path).progress == Progress(2, 16, memory)
    raw = read_json(path / "manifest.json")
    for key in ("guard", "topology", "replicas"):
        del raw[key]
    write_json(path / "manifest.json", raw)
    old = checkpoint.newest(tmp_path)
    assert old is not None and old.progress == Progress(2, 16)
    checkpoint.load(old, session.parameters, session.optimizer)


def test_the_reader_of_dcp_reads_the_files(session: Session, tmp_path: Path) -> None:
    manifest = save(session, tmp_path)
    found = {"exp_avg.wpe.weight": torch.empty(16, 32)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(found, checkpoint_id=manifest.path, no_dist=True)
    moment = session.optimizer.state[session.parameters["wpe.weight"]]["exp_avg"]
    assert torch.equal(found["exp_avg.wpe.weight"], moment) and moment.any()


def test_large_tensors_are_read_directly_into_their_targets(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_MIN_RAW", 1 << 12)
    manifest = save(session, tmp_path)
    asked: list[str] = []
    real = FileSystemReader.read_data

    def read_data(reader: Any, plan: Any, planner: Any) -> Any:
        asked.extend(item.dest_index.fqn for item in plan.items)
        return real(reader, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", read_data)
    other = open_session(session.plan, ALONE)
    checkpoint.load(manifest, other.parameters, other.optimizer)
    assert "model.h.0.ln_1.weight" in asked and "model.wte.weight" not in asked and "step" in asked
    for name, mine in session.parameters.items():
        assert torch.equal(mine[:257], other.parameters[name][:257]), name


def test_many_tensors_make_several_files_and_each_hash_is_that_of_its_file(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_MIN_FILE", 1 << 15)
    manifest = save(session, tmp_path)
    parts = [entry["size"] for name, entry in manifest.files.items() if name.endswith(".distcp")]
    assert 4 < len(parts) <= 16 and sum(parts) > 3 * 34_208 * 4
    for name, entry in manifest.files.items():
        assert xxhash.xxh3_128_hexdigest((manifest.path / name).read_bytes()) == entry["xxh3"], name
    other = open_session(session.plan, ALONE)
    checkpoint.load(manifest, other.parameters, other.optimizer)
    assert torch.equal(other.parameters["h.1.mlp.c_fc.weight"], session.parameters["h.1.mlp.c_fc.weight"])


def test_a_save_computes_no_crc32_besides_the_hash(session: Session, tmp_path: Path) -> None:
    manifest = save(session, tmp_path)
    records = read_metadata(manifest.path).storage_data.values()
    for record in records:
        data = (manifest.path / record.relative_path).read_bytes()[record.offset : record.offset + record.length]
        assert {entry.CRC for entry in ZipFile(BytesIO(data)).infolist()} == {0}
    assert len(records) == 3 * 28 + 1
    assert torch.serialization.get_crc32_options()


def test_a_large_file_is_on_its_way_to_the_disk_before_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(storage, "_WRITE_BACK", 2 << 20)
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, start, size, _advice: asked.append((start, size)))
    data = os.urandom(5 << 20)
    with storage.HashedFile(tmp_path / "file") as file:
        file.write(data[:100])
        file.write(data[100:])
    assert asked[0][0] == 0 and len(asked) == 2
    assert all(before[0] + before[1] == after[0] for before, after in pairwise(asked))
    assert file.entry() == {"size": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
    assert (tmp_path / "file").read_bytes() == data


def test_each_rank_writes_its_own_true_rows_and_reads_them_back(tmp_path: Path) -> None:
    """512 rows over 2 x 2 ranks, 257 of them true: the last rank has none. A single process reads the same numbers."""
    config = make_run(tmp_path, parallel={"tensor": 2, "data": 2, "zero_stage": 1}, train={"iterations": 1})
    launch_ok(4, "tests.training.worker", config, tmp_path / "seen", "--save-at", 1)
    folder = tmp_path / "models" / "tiny" / "iter_0000001"
    manifest = checkpoint.read_manifest(folder)
    for key in ("model.wte.weight", "exp_avg.wte.weight", "exp_avg_sq.wte.weight"):
        stored = read_metadata(folder).state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata) and stored.size == (257, 32)
        assert sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in stored.chunks) == [(0, 128), (128, 128), (256, 1)]
    alone = open_session(make_plan(settings_of(make_run(tmp_path / "alone")), "tiny"), ALONE)
    with torch.no_grad():
        alone.parameters["wte.weight"].fill_(7)
    checkpoint.load(manifest, alone.parameters, alone.optimizer)
    rows = alone.parameters["wte.weight"]
    assert torch.equal(rows[:257], checkpoint.load_weights(manifest)["wte.weight"]) and rows[256].any()
    assert not rows[257:].any() and alone.optimizer.state[rows]["exp_avg"][:257].any(1).sum() > 20


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False], ids=["8 ranks to 2", "2 ranks to 8"])
def test_a_checkpoint_loads_in_another_layout(tmp_path: Path, there: bool) -> None:
    """Two steps, a save, and two steps in another layout give the losses and norms of one uninterrupted process."""
    model = {"dropout": 0.0, "n_layer": 3}
    (straight,) = _continued(tmp_path / "straight", {}, model)
    layouts = [{"tensor": 4, "pipeline": 2}, {"data": 2, "zero_stage": 1}]
    first, second = layouts if there else reversed(layouts)
    _continued(tmp_path / "first", first, model, save_at=2)
    part = Path("models") / "tiny" / "iter_0000002"
    shutil.copytree(tmp_path / "first" / part, tmp_path / "second" / part)
    for seen in _continued(tmp_path / "second", second, model):
        assert len(seen["loss"]) == 2
        for key in ("loss", "norm"):
            assert seen[key] == pytest.approx(straight[key][2:], rel=1e-4), key


def _continued(folder: Path, parallel: dict[str, int], model: dict[str, Any], save_at: int = 0) -> list[dict[str, Any]]:
    """What each rank sees from the newest checkpoint in `folder` to step 4."""
    config = make_run(folder, model=model, parallel=parallel)
    size = parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("data", 1)
    if size == 1:
        return [steps(config, ALONE, save_at)]
    launch_ok(size, "tests.training.worker", config, folder / "seen", "--save-at", save_at)
    return [read_json(folder / f"seen.{rank}.json") for rank in range(size)]


def test_the_remains_of_a_killed_save_are_ignored_and_removed(session: Session, tmp_path: Path) -> None:
    leftover = tmp_path / "iter_0000002.tmp"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    assert checkpoint.newest(tmp_path) is None
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        checkpoint.resolve(leftover)
    assert save(session, tmp_path, 2).progress.iteration == 2
    assert not leftover.exists()


def test_a_moved_model_folder_still_has_its_vocabulary(session: Session, tmp_path: Path) -> None:
    originals = {"encoder_json": tmp_path / "elsewhere.json", "vocab_bpe": tmp_path / "elsewhere.bpe"}
    for key, path in originals.items():
        path.write_text(key)
    plan = replace(session.plan, tokenize=session.plan.tokenize.model_copy(update=originals))
    path = save_checkpoint(tmp_path / "run", session.parameters, session.optimizer, Progress(2, 16), plan)
    for original in originals.values():
        original.unlink()
    (tmp_path / "run").rename(tmp_path / "moved")
    found = checkpoint.resolve(tmp_path / "moved" / path.name).tokenize
    assert found.encoder_json == tmp_path / "moved" / "tokenizer" / "encoder.json"
    for key in originals:
        assert getattr(found, key).read_text() == key


def test_a_manifest_with_sha256_only_is_still_verified(session: Session, tmp_path: Path) -> None:
    manifest = save(session, tmp_path)
    raw = read_json(manifest.path / "manifest.json")
    for name, entry in raw["files"].items():
        del entry["xxh3"]
        entry["sha256"] = hashlib.sha256((manifest.path / name).read_bytes()).hexdigest()
    write_json(manifest.path / "manifest.json", raw)
    checkpoint.verify(checkpoint.read_manifest(manifest.path))
    file = next(manifest.path.glob("*.distcp"))
    file.write_bytes(bytes(reversed(file.read_bytes())))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.verify(checkpoint.read_manifest(manifest.path))


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_files_damaged_after_verification_give_one_line(session: Session, tmp_path: Path, damage: str) -> None:
    manifest = save(session, tmp_path)
    file = next(manifest.path.glob("*.distcp"))
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:100_000])
    with pytest.raises(CheckpointError, match="iter_0000002: cannot be read"):
        checkpoint.load(manifest, session.parameters, session.optimizer)


def test_each_rank_verifies_a_share_of_the_files(session: Session, tmp_path: Path) -> None:
    manifest = save(session, tmp_path)
    second = sorted(manifest.files)[1]
    data = bytearray((manifest.path / second).read_bytes())
    data[500] ^= 1
    (manifest.path / second).write_bytes(data)
    checkpoint.verify(manifest, slice(0, None, 2))
    with pytest.raises(CheckpointError, match=f"{second}: damaged"):
        checkpoint.verify(manifest, slice(1, None, 2))


def test_other_model_settings_are_refused_by_key(session: Session, tmp_path: Path) -> None:
    manifest = save(session, tmp_path)
    check_fits(manifest, session.plan)
    for section, key, value in (("model", "n_layer", 3), ("train", "seed", 7), ("train", "split", "1,1,1")):
        run = session.plan.experiment.model_dump()
        was, run[section][key] = run[section][key], value
        other = replace(session.plan, experiment=Experiment.model_validate(run))
        with pytest.raises(
            CheckpointError, match=rf"models\.tiny\.{section}\.{key} is {value} .* checkpoint has {was}"
        ):
            check_fits(manifest, other)


def test_another_dataset_is_refused(session: Session, tmp_path: Path) -> None:
    manifest = save(session, tmp_path)
    corpus = session.plan.data.train.parts[0].corpus
    other = Corpus(corpus.prefix, corpus.tokens, corpus.starts[1:], corpus.lengths[1:])
    samples = [Samples(corpus, range(corpus.documents), 8), Samples(other, range(other.documents), 8)]
    for blend in (Blend(samples[1:], [1]), Blend(samples, [1, 1])):
        with pytest.raises(CheckpointError, match="was trained on another dataset"):
            check_fits(manifest, replace(session.plan, data=session.plan.data._replace(train=blend)))
    check_fits(manifest, replace(session.plan, data=session.plan.data._replace(train=Blend(samples[:1], [7]))))


@pytest.mark.parametrize("vocab_size", [257, None], ids=["ours", "another tool's"])
def test_another_text_in_documents_of_the_same_lengths_is_refused(tmp_path: Path, vocab_size: int | None) -> None:
    config = make_run(tmp_path)
    prefix = load_settings(config).dataset_prefix
    write_corpus(prefix, byte_documents(60), vocab_size)
    if vocab_size is None:
        prefix.with_name(prefix.name + ".json").unlink(missing_ok=True)
    plan = make_plan(settings_of(config), "tiny")
    manifest = save(open_session(plan, ALONE), tmp_path / "run")
    assert check_fits(manifest, make_plan(settings_of(config), "tiny")) == ""
    shutil.copytree(prefix.parent, tmp_path / "elsewhere")
    moved = Samples(Corpus.open(tmp_path / "elsewhere" / prefix.name), range(54), 8)
    check_fits(manifest, replace(plan, data=plan.data._replace(train=Blend([moved], [1]))))
    documents = byte_documents(60)
    documents[7][3] ^= 1
    write_corpus(prefix, documents, vocab_size)
    changed = make_plan(settings_of(config), "tiny")
    with pytest.raises(CheckpointError, match=r"another text than .* documents of the same lengths"):
        check_fits(manifest, changed)


def test_a_folder_without_a_checkpoint_of_ours_is_named(tmp_path: Path) -> None:
    megatron = tmp_path / "megatron" / "iter_0000100" / "mp_rank_00"
    megatron.mkdir(parents=True)
    for path in (megatron, megatron.parent, megatron.parent.parent):
        with pytest.raises(CheckpointError, match="Megatron checkpoint"):
            checkpoint.resolve(path)
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoint.resolve(tmp_path / "absent")
    shutil.rmtree(tmp_path / "megatron")
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        checkpoint.resolve(tmp_path)
