"""The command as a user runs it: curves, checkpoints, bitwise resume, one line per mistake."""

import ast
import json
import math
import os
import re
import shutil
from collections import Counter
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from common import cli
from common.config import load_settings
from common.errors import ConfigError
from common.files import read_json, read_rows
from common.settings import Experiment, ModelSettings
from tests.helpers import called
from tests.training.helpers import (
    Capsys,
    byte_documents,
    byte_vocabulary,
    copy_run,
    course,
    launch_ok,
    make_run,
    refusal,
    settings_of,
    tensor_files,
    train_tiny,
    write_corpus,
)
from training import trainer
from training.model_folder import is_finished
from training.optimizer import learning_rate, steps_taken
from training.planning.speed import flops_per_token
from training.train import main


def test_a_run_writes_its_curves_settings_and_done_json(tiny_run: Path) -> None:
    said = (tiny_run / "stdout").read_text()
    assert [line.partition(": ")[2] for line in said.splitlines() if line.startswith("starting: ")] == [
        "imports PyTorch",
        "waits for all 2 processes",
        "opens the data",
        "opens the device",
        "connects the 2 processes",
        "imports the trainer",
        "plans memory and time",
        "checks the nodes and their connections",
        "builds the model",
        "times a step, as a run on CPUs may take too long",
        "iteration 1",
    ]
    assert "iteration       20/      20 | consumed samples:          160" in said
    assert said.count("time (ms) | forward-backward: ") == 20
    folder = tiny_run / "models/tiny"
    rows, valid = read_rows(folder / "train.csv"), read_rows(folder / "valid.csv")
    losses = [float(row["lm_loss"]) for row in rows]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    assert [row["iteration"] for row in valid] == ["10", "20"]
    assert json.loads((folder / "done.json").read_text()) == {
        "iteration": 20,
        "checkpoint": "iter_0000020",
        "consumed_samples": 160,
        "train_loss": losses[-1],
        "valid_loss": float(valid[-1]["loss"]),
    }
    tiny = yaml.safe_load((folder / "settings.yaml").read_text())["models"]["tiny"]
    of_both = flops_per_token(ModelSettings(**tiny["model"])) * float(rows[-1]["tokens_per_second"]) / 1e12
    assert float(rows[-1]["tflops"]) == pytest.approx(of_both / 2, rel=1e-3)
    card, plan = read_json(folder / "run.json"), read_json(folder / "plan.json")
    assert (card["settings"]["path"], card["processes"]) == ("settings.yaml", 2)
    assert [Path(entry["path"]).suffix for entry in card["inputs"]] == [".bin", ".idx"]
    assert plan["text"] in said and sum(plan["memory"].values()) == pytest.approx(plan["memory_bytes"])
    files = "done.json iter_0000010 iter_0000020 latest plan.json run.json settings.yaml starts.csv tensorboard"
    assert sorted(path.name for path in folder.iterdir()) == [*files.split(), "train.csv", "valid.csv"]


def test_ten_iterations_a_resume_and_ten_more_equal_twenty_bit_for_bit(tiny_run: Path, tmp_path: Path) -> None:
    config = copy_run(tiny_run, tmp_path)
    straight, folder = tiny_run / "models/tiny", tmp_path / "models/tiny"
    shutil.rmtree(folder / "iter_0000020")  # as if killed before its last checkpoint; the curves had gone further
    (folder / "done.json").unlink()
    results = launch_ok(2, "training.train", "--config", config, "--model", "tiny")
    assert f"resumed from {folder}/iter_0000010" in results[0].stdout
    assert results[1].stdout == ""  # rank 0 alone speaks
    starts = [(row["iteration"], row["processes"], row["consumed_samples"]) for row in read_rows(folder / "starts.csv")]
    consumed = read_json(folder / "iter_0000010/manifest.json")["consumed_samples"]
    assert starts == [("0", "2", "0"), ("10", "2", str(consumed))] and consumed > 0
    assert course(folder) == course(straight)
    assert (folder / "valid.csv").read_text() == (straight / "valid.csv").read_text()
    assert tensor_files(folder / "iter_0000020") == tensor_files(straight / "iter_0000020")


def test_a_short_run_has_a_curve_whatever_its_log_interval(tmp_path: Path) -> None:
    """Also one that is resumed."""
    train = {"iterations": 25, "save_interval": 7, "log_interval": 100}
    config, folder = make_run(tmp_path, train=train), tmp_path / "models/tiny"
    assert train_tiny(config) == 0
    rows, straight = read_rows(folder / "train.csv"), course(folder)
    assert [row["iteration"] for row in rows] == ["1", *map(str, range(2, 25, 2)), "25"]
    for iteration in (14, 21, 25):  # as if killed: 7 lies between two rows
        shutil.rmtree(folder / f"iter_{iteration:07d}")
    (folder / "done.json").unlink()
    assert train_tiny(config) == 0
    assert course(folder) == straight
    shutil.rmtree(folder)
    assert train_tiny(config, "train.log_interval=5", "train.iterations=50") == 0
    assert [row["iteration"] for row in read_rows(folder / "train.csv")] == ["1", *map(str, range(5, 51, 5))]


def test_a_finished_run_is_left_alone_and_continues_when_asked_for_more(tmp_path: Path, capsys: Capsys) -> None:
    config, folder = make_run(tmp_path), tmp_path / "models/tiny"
    assert train_tiny(config) == 0
    plan = capsys.readouterr().out.partition("iteration ")[0]  # printed before training
    assert "2 micro x 4 accumulation x 1 data = 8 samples = 128 tokens" in plan
    (folder / "done.json").unlink()
    before = (folder / "train.csv").read_bytes()
    assert not is_finished(settings_of(config), "tiny")
    for override in ("train.lr=0.5", "train.iterations=3"):  # of the checkpoint alone, and then of done.json, too
        told = refusal(capsys, main, "--config", config, "--model", "tiny", override)
        assert f"models.tiny: {override.partition('=')[0]} " in told and f"{folder} is finished" in told
    assert train_tiny(config) == 0 and is_finished(settings_of(config), "tiny")
    with pytest.raises(ConfigError, match=r"models\.tiny: train\.lr 0\.\d+ -> 0\.5, but .* or move the folder away"):
        is_finished(load_settings(config, ["train.lr=0.5"], "tiny"), "tiny")
    assert (folder / "train.csv").read_bytes() == before
    assert read_json(folder / "done.json")["iteration"] == 4
    assert train_tiny(config, "train.iterations=6", "train.global_batch_size=16", "model.dropout=0") == 0
    said = capsys.readouterr().out
    assert f"resumed from {folder}/iter_0000004: 2 iterations left\n" in said
    assert "model.dropout 0.1 -> 0.0, train.iterations 4 -> 6, train.global_batch_size 8 -> 16" in said
    # 4 x 8 samples are consumed, 2 x 16 are left
    assert "6 iterations, 2 left, 64 samples, 1,024 tokens" in said
    # a warm-up of a quarter of 4 is 1, of 6 it is 2; the cosine of 4 had come to its end
    assert "learning rate: 1e-05 in the last step, 0.00251 in the next one" in said
    assert read_json(folder / "done.json")["checkpoint"] == "iter_0000006"
    assert [row["iteration"] for row in read_rows(folder / "train.csv")] == list("123456")


def test_rows_are_on_the_disk_before_the_checkpoint_after_which_no_start_repeats_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, synced, rows = make_run(tmp_path), Counter[str](), list[int]()

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[path.name] = os.fstat(descriptor).st_size
        if path.name == "manifest.json.tmp":
            curve = (tmp_path / "models/tiny/train.csv").read_bytes()
            rows.append(curve[: synced["train.csv"]].count(b"\n") - 1)

    monkeypatch.setattr(os, "fsync", sync)
    assert train_tiny(config, "train.save_interval=2") == 0
    assert rows == [2, 4]


def test_a_run_of_months_on_cpus_is_refused_by_the_time_of_a_whole_step_on_the_slowest_rank(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(tmp_path, train={"warmup_iterations": 1, "micro_batch_size": 2, "global_batch_size": 8})
    monkeypatch.setattr("training.job.time", SimpleNamespace(perf_counter=count(0, 5).__next__))
    monkeypatch.setattr("training.job.all_gather", lambda seconds: [seconds, seconds + 2.0])
    told = refusal(capsys, main, "--config", config, "--model", "tiny", "train.iterations=1000000")
    assert "at 28 s per iteration" in told and "allow_slow" in told
    assert not list((tmp_path / "models/tiny").glob("iter_*"))


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("model.seq_len=100000", "model.seq_len"),
        ("model.vocab_size=300", "models.tiny.model.vocab_size is 300"),
        ("parallel.tensor=2", "tensor 2 = 2 processes"),
        ("parallel={auto: true, gpus: 4}", "models.tiny.parallel: auto over 4 processes, but 1"),
        ("train={keep_best: true, split: '1,0,0'}", "leaves no validation part"),
        ("train.no_decay=[ln_1.weight]", "no_decay: no parameter is called 'ln_1.weight'"),
        ("model.n_hed=2", "'models.tiny.model.n_hed' (did you mean 'n_head'?)"),
        ("model={n_layer: 9000, n_head: 4, n_embd: 16384, seq_len: 16, vocab_size: 257}", "models.tiny needs "),
    ],
)
def test_a_model_that_does_not_fit_stops_in_one_line_before_anything_is_written(
    tmp_path: Path, override: str, names: str, capsys: Capsys
) -> None:
    assert names in refusal(capsys, main, "--config", make_run(tmp_path), "--model", "tiny", override)
    assert not list(tmp_path.glob("models/tiny/*.*"))


def test_a_checkpoint_of_another_model_is_refused(tiny_run: Path, tmp_path: Path, capsys: Capsys) -> None:
    config = make_run(tmp_path, model={"n_layer": 1})
    shutil.copytree(tiny_run / "models/tiny/iter_0000010", tmp_path / "models/tiny/iter_0000010")
    assert "models.tiny.model.n_layer is 1" in refusal(capsys, main, "--config", config, "--model", "tiny")


def test_a_layout_that_the_planner_chose_is_kept_when_the_run_goes_on(tmp_path: Path, capsys: Capsys) -> None:
    train = {"micro_batch_size": 0, "iterations": 2}
    config = make_run(tmp_path, parallel={"auto": True}, train=train, cluster={"tasks_per_node": 2})

    def layout() -> Experiment:
        return load_settings(tmp_path / "models/tiny/settings.yaml").models["tiny"]

    assert train_tiny(config) == 0
    assert (layout().parallel.auto, layout().world_size, layout().train.global_batch_size) == (False, 1, 8)
    # a choice that the planner would not make shows that it is not asked again
    assert train_tiny(config, "train.recompute=full", "parallel.auto=false", "train.iterations=3") == 0
    assert train_tiny(config, "train.iterations=4") == 0
    assert f"as in {tmp_path}/models/tiny/settings.yaml" in capsys.readouterr().err
    assert layout().train.recompute == "full"
    # with another number of processes it is planned again
    first, _ = launch_ok(2, "training.train", "--config", config, "--model", "tiny", "train.iterations=5")
    assert re.search("on 2 processes, chosen by the planner", first.stderr) and "resumed from" in first.stdout
    assert (layout().world_size, layout().train.recompute) == (2, "none")


def test_texts_of_the_weights_go_to_the_log_and_change_no_number(tmp_path: Path, capsys: Capsys) -> None:
    files, runs = byte_vocabulary(tmp_path), [tmp_path / "silent", tmp_path / "talking"]
    keys = [f"tokenize.encoder_json={files.encoder_json}", f"tokenize.vocab_bpe={files.vocab_bpe}"]
    for folder, interval in zip(runs, (0, 2), strict=True):
        train = {"sample_interval": interval, "sample_prompt": "The ", "precision": "float32"}
        assert train_tiny(make_run(folder, model={"dropout": 0.1}, train=train), *keys) == 0
    said = capsys.readouterr().out
    texts = [line.split(" | ", 1) for line in said.splitlines() if line.startswith("sample ")]
    assert [head for head, _ in texts] == ["sample at iteration 2", "sample at iteration 4"]
    silent, talking = (folder / "models/tiny" for folder in runs)
    assert course(silent) == course(talking)
    assert tensor_files(silent / "iter_0000004") == tensor_files(talking / "iter_0000004")
    asked = ("--checkpoint", talking, "--prompt", "The ", "--max-tokens", 32, "--seed", 1234)
    text = called("training.generate", *asked).stdout.removesuffix("\n")  # of the same weights
    assert ast.literal_eval(texts[1][1]).removesuffix("<|endoftext|>") == text
    config = runs[0] / "config.yaml"
    assert "sample_interval" in refusal(capsys, main, "--config", config, "--model", "tiny", "train.sample_interval=1")


def test_a_run_that_improves_no_more_ends_and_keeps_its_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    losses = {1: 5.0, 2: 4.0, 3: 4.5, 4: math.nan, 5: 4.2}
    monkeypatch.setattr(trainer, "validate", lambda session, *_: losses[steps_taken(session.optimizer)])
    train = {"iterations": 9, "eval_interval": 1, "save_interval": 2, "keep_last": 2, "keep_best": True}
    config = make_run(tmp_path, train={**train, "stop_after_no_improvement": 3})
    folder, ended = tmp_path / "models/tiny", "iteration 5 of 9: no validation loss below 4.0000 in 3 runs"
    for _ in range(2):
        assert train_tiny(config) == 0
        assert f"ended at {ended}" in capsys.readouterr().out
        assert sorted(path.name for path in folder.glob("iter_*")) == [f"iter_000000{number}" for number in (2, 4, 5)]
        assert cli.checkpoint_path(str(folder / "best")) == folder / "iter_0000002"
        done = read_json(folder / "done.json")
        assert (done["checkpoint"], done["validations_without_improvement"]) == ("iter_0000005", 3)
        shutil.rmtree(folder / "iter_0000005")  # as if killed before its last checkpoint: the count goes on from 2
    assert train_tiny(config) == 0 and is_finished(settings_of(config), "tiny")
    assert train_tiny(config) == 0
    assert f"already at {ended}" in capsys.readouterr().out


def test_a_validation_after_skipped_steps_alone_is_no_missed_improvement(tmp_path: Path, capsys: Capsys) -> None:
    train = {"precision": "float16", "initial_loss_scale": 2.0**126, "eval_interval": 1, "save_interval": 2}
    config = make_run(tmp_path, train={**train, "iterations": 3, "stop_after_no_improvement": 1})
    for iterations in (3, 5):  # the second time from a checkpoint
        assert train_tiny(config, f"train.iterations={iterations}") == 0
        done = read_json(tmp_path / "models/tiny/done.json")
        assert done["iteration"] == iterations and "ended" not in capsys.readouterr().out


def test_removed_documents_are_no_steps_no_losses_and_no_end(tmp_path: Path, capsys: Capsys) -> None:
    """A removal writes end-of-text over a document: here whole batches have no targets."""
    ended = {"eval_interval": 3, "stop_after_no_improvement": 1, "iterations": 60, "log_interval": 20, "split": "9,2,1"}
    config = make_run(tmp_path, train={**ended, "micro_batch_size": 1, "global_batch_size": 2})
    removed, documents = np.full(1600, 256), byte_documents(7)
    write_corpus(load_settings(config).dataset_prefix, [removed, removed, *documents, *[removed[:200]] * 3])
    assert train_tiny(config) == 0
    captured = capsys.readouterr()
    rows = read_rows(tmp_path / "models/tiny/train.csv")
    without = captured.err.count("no targets, and no step is taken")
    assert 5 < without == sum(int(row["skipped"]) for row in rows) < 55
    losses = [float(row["lm_loss"]) for row in rows if row["lm_loss"]]  # none if no step since the row before was taken
    assert all(1 < loss < 7 for loss in losses) and {row["non_finite"] for row in rows} == {"0"}
    assert read_rows(tmp_path / "models/tiny/valid.csv") == [] and not (tmp_path / "models/tiny/test.json").exists()
    assert (
        captured.err.count("the valid part has no targets") == captured.err.count("the test part has no targets") == 1
    )
    assert read_json(tmp_path / "models/tiny/done.json")["iteration"] == 60
    train = settings_of(config).models["tiny"].train
    rates = [learning_rate(60 - without - last, train) for last in (0, 1)]
    assert float(rows[-1]["learning_rate"]) in rates, "the schedule counts the steps that were taken"


def test_the_settings_of_a_model_train_another_one_under_a_new_name(tmp_path: Path, capsys: Capsys) -> None:
    config = make_run(tmp_path)
    assert train_tiny(config, "--name", "tiny-3e-4", "train.lr=3e-4", "train.iterations=1") == 0
    assert not (tmp_path / "models/tiny").exists()
    assert settings_of(tmp_path / "models/tiny-3e-4/settings.yaml").models["tiny-3e-4"].train.lr == 3e-4
    assert "tiny-3e-4" in called("cluster.status", tmp_path).stdout
    for name, told in (("tiny", "has a model 'tiny'"), ("tiny.1", "letters, digits")):
        assert told in refusal(capsys, main, "--config", config, "--model", "tiny", "--name", name)
