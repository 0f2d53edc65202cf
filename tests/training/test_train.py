"""The command as a user runs it: curves, checkpoints, resume bit for bit, and one line for every mistake."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from common.config import load_settings
from common.errors import InputError
from common.files import read_json, read_rows
from common.settings import Experiment, ModelSettings, Settings
from tests.conftest import Command
from tests.training.helpers import launch, launch_ok, make_run, run_main
from training import train
from training.checkpoint.storage import without_process_group_warning
from training.leaving import RESUME_ME, TO_CURE
from training.model_folder import failed_mark
from training.parallel.launch import Launch
from training.parallel.lifeline import Failure
from training.parallel.process_group import QuietExit
from training.planning.flops import flops_per_token
from training.train import main

TWO_RANKS = {"parallel": {"tensor": 2}, "model": {"dropout": 0.1}}
TRAIN = {"iterations": 20, "save_interval": 10, "eval_interval": 10}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder after 20 iterations on two tensor-parallel processes with dropout, never stopped."""
    folder = tmp_path_factory.mktemp("straight")
    config = make_run(folder, **TWO_RANKS, train=TRAIN)
    results = launch_ok(2, "training.train", "--config", config, "--model", "tiny")
    assert "iteration       20/      20 | consumed samples:          160" in results[0].stdout
    assert results[0].stdout.count("time (ms) | forward-backward: ") == 20
    assert results[0].stdout.count("(after 1 iterations) memory (MB)") == 1
    assert results[1].stdout == ""  # rank 0 alone speaks
    return folder / "models" / "tiny"


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, optimiser included."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {key: torch.empty(entry.size) for key, entry in stored.items()}
    with without_process_group_warning():
        load(found, checkpoint_id=path, no_dist=True)
    return found


def test_a_run_writes_its_curves_settings_and_done_json(straight: Path) -> None:
    rows = read_rows(straight / "train.csv")
    losses = [float(row["lm_loss"]) for row in rows]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    valid = read_rows(straight / "valid.csv")
    assert [row["iteration"] for row in valid] == ["10", "20"]
    done = json.loads((straight / "done.json").read_text())
    assert done == {
        "iteration": 20,
        "checkpoint": "iter_0000020",
        "consumed_samples": 160,
        "train_loss": losses[-1],
        "valid_loss": float(valid[-1]["loss"]),
    }
    tiny = yaml.safe_load((straight / "settings.yaml").read_text())["models"]["tiny"]
    assert tiny["train"]["iterations"] == 20
    of_both = flops_per_token(ModelSettings(**tiny["model"])) * float(rows[-1]["tokens_per_second"]) / 1e12
    assert float(rows[-1]["tflops"]) == pytest.approx(of_both / 2, rel=1e-3)
    card = json.loads((straight / "run.json").read_text())
    assert (
        card["settings"]["path"] == "settings.yaml" and card["processes"] == 2 and card["seeds"]["train.seed"] == 1234
    )
    assert [Path(entry["path"]).suffix for entry in card["inputs"]] == [".bin", ".idx"]
    assert sorted(path.name for path in straight.iterdir()) == [
        "done.json",
        "iter_0000010",
        "iter_0000020",
        "latest",
        "plan.json",
        "run.json",
        "settings.yaml",
        "starts.csv",
        "tensorboard",
        "train.csv",
        "valid.csv",
    ]


def test_ten_iterations_a_resume_and_ten_more_equal_twenty_bit_for_bit(straight: Path, tmp_path: Path) -> None:
    config = make_run(tmp_path, **TWO_RANKS, train=TRAIN)
    folder = tmp_path / "models" / "tiny"
    shutil.copytree(straight / "iter_0000010", folder / "iter_0000010")
    for name in ("train.csv", "valid.csv"):  # the killed run had gone further than its checkpoint
        shutil.copyfile(straight / name, folder / name)
    results = launch_ok(2, "training.train", "--config", config, "--model", "tiny")
    assert "resumed from" in results[0].stdout
    (start,) = read_rows(folder / "starts.csv")
    assert (start["iteration"], start["processes"]) == ("10", "2")
    plan = read_json(folder / "plan.json")
    assert plan["text"] in results[0].stdout and sum(plan["memory"].values()) == pytest.approx(plan["memory_bytes"])

    def course(run: Path) -> list[tuple[str, ...]]:
        keys = ("iteration", "consumed_samples", "learning_rate", "lm_loss", "grad_norm")
        return [tuple(row[key] for key in keys) for row in read_rows(run / "train.csv")]

    assert course(folder) == course(straight)
    assert (folder / "valid.csv").read_text() == (straight / "valid.csv").read_text()
    resumed, expected = tensors(folder / "iter_0000020"), tensors(straight / "iter_0000020")
    assert resumed.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(resumed[key], value), key


def test_a_run_prints_its_plan_is_left_alone_when_finished_and_continues_when_asked_for_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(tmp_path)
    folder = tmp_path / "models" / "tiny"
    assert run_main(main, "--config", config, "--model", "tiny") == 0
    plan = capsys.readouterr().out.partition("iteration ")[0]  # printed before training
    assert "34,208 (vocabulary 257; 38,272 padded to 384)" in plan
    assert "2 micro x 4 accumulation x 1 data = 8 samples = 128 tokens" in plan
    assert "4 iterations, 32 samples, 512 tokens" in plan
    assert re.search(r"^memory +predicted [\d.]+ GiB of [\d.]+ per process: parameters ", plan, re.M)
    assert re.search(r"^time +not predicted$", plan, re.M)
    row = next(line for line in plan.splitlines() if "  train  " in line).split()
    assert row[3] == "54" and row[-1] == "0.05"  # documents, epochs
    (folder / "done.json").unlink()
    before = (folder / "train.csv").read_bytes()
    assert run_main(main, "--config", config, "--model", "tiny") == 0
    assert "already at iteration 4 of 4" in capsys.readouterr().out
    assert (folder / "train.csv").read_bytes() == before
    assert json.loads((folder / "done.json").read_text())["iteration"] == 4
    more = ("train.iterations=6", "train.global_batch_size=16", "model.dropout=0", "train.weight_decay=0.02")
    assert run_main(main, "--config", config, "--model", "tiny", *more) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"resumed from {folder}/iter_0000004: 2 iterations left\n")
    assert "changed since iter_0000004: model.dropout 0.1 -> 0.0, train.iterations 4 -> 6, train.global" in said
    assert "train.global_batch_size 8 -> 16, train.weight_decay 0.01 -> 0.02\n" in said
    # 4 x 8 samples are consumed, 2 x 16 are left
    assert "6 iterations, 2 left, 64 samples, 1,024 tokens" in said
    # a warm-up of a quarter of 4 is 1, of 6 it is 2; the cosine of 4 had come to its end
    assert "learning rate: 1e-05 in the last step, 0.00251 in the next one; the schedule of the checkpoint" in said
    assert "; to hold that: train.decay_iterations=4 train.warmup_iterations=1\n" in said
    assert json.loads((folder / "done.json").read_text())["checkpoint"] == "iter_0000006"
    assert [row["iteration"] for row in read_rows(folder / "train.csv")] == list("123456")
    held = ("train.iterations=7", "train.decay_iterations=6", "train.warmup_iterations=2")
    assert run_main(main, "--config", config, "--model", "tiny", *held) == 0
    assert "learning rate:" not in capsys.readouterr().out.partition("iteration ")[0]
    assert float(read_rows(folder / "train.csv")[-1]["learning_rate"]) == 1e-5


def test_a_run_that_would_take_months_on_cpus_is_refused_after_three_passes_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(tmp_path)
    command = ("--config", config, "--model", "tiny")
    monkeypatch.setattr("training.trainer._LONGEST", 0)
    assert run_main(main, *command) == 2
    assert re.fullmatch(
        r"error: models\.tiny would take about \d+ s on these CPUs, at [\d.e-]+ s per iteration \(the best of three\); "
        r"train a smaller model, or on GPUs, or set train\.allow_slow=true to start anyway\n",
        capsys.readouterr().err,
    )
    assert not list((tmp_path / "models/tiny").glob("iter_*"))
    assert run_main(main, *command, "train.allow_slow=true") == 0
    unmeasured = (tmp_path / "models/tiny/train.csv").read_text().splitlines()[-1].split(",")[:6]
    shutil.rmtree(tmp_path / "models")
    monkeypatch.undo()
    assert run_main(main, *command) == 0  # measuring changes no number
    assert (tmp_path / "models/tiny/train.csv").read_text().splitlines()[-1].split(",")[:6] == unmeasured


def test_a_finished_run_stays_finished_whatever_fails_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(5, "Input/output error")

    config, folder = make_run(tmp_path), tmp_path / "models/tiny"
    for tidying in ("metrics.boards.TensorBoard.close", "monitoring.run_claim.RunClaim.release"):
        monkeypatch.setattr(f"training.{tidying}", refuse)
    assert run_main(main, "--config", config, "--model", "tiny") == 0
    assert json.loads((folder / "done.json").read_text())["iteration"] == 4
    assert capsys.readouterr().err.count("warning: TensorBoard: [Errno 5]") == 1
    (folder / "done.json").unlink()
    (folder / "train.csv").write_bytes(b"\xff\xfe spoilt")
    assert run_main(main, "--config", config, "--model", "tiny") == 0
    assert json.loads((folder / "done.json").read_text())["checkpoint"] == "iter_0000004"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.seq_len=100000", "lower model.seq_len"),
        ("model.vocab_size=300", "made with a vocabulary of 257, but models.tiny.model.vocab_size is 300"),
        ("parallel.tensor=2", "pipeline 1 x data 1 x tensor 2 = 2 processes, but 1"),
        ("model.n_hed=2", "unknown key 'models.tiny.model.n_hed' (did you mean 'n_head'?)"),
    ],
)
def test_a_model_that_does_not_fit_stops_in_one_line(
    tmp_path: Path, override: str, says: str, command: Command
) -> None:
    result = command("training.train", "--config", make_run(tmp_path), "--model", "tiny", override)
    assert result.returncode == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    assert not (tmp_path / "models").exists()


def test_a_checkpoint_of_another_model_stops_two_ranks_in_one_line(straight: Path, tmp_path: Path) -> None:
    config = make_run(tmp_path, parallel={"tensor": 2}, model={"n_layer": 1}, train=TRAIN)
    shutil.copytree(straight / "iter_0000010", tmp_path / "models" / "tiny" / "iter_0000010")
    results = launch(2, "training.train", "--config", config, "--model", "tiny")
    assert [result.returncode for result in results] == [2, 2]
    assert "models.tiny.model.n_layer is 1 in the configuration, but the checkpoint has 2" in results[0].stderr
    assert results[0].stderr.count("\n") == 1
    assert results[1].stderr == ""


@pytest.mark.parametrize(
    "error, marked",
    [
        (InputError("corpus.bin: empty"), "corpus.bin: empty\n"),
        (QuietExit(Failure("corpus.bin: empty", TO_CURE)), "corpus.bin: empty\n"),  # srun may kill the one that prints
        (QuietExit(Failure("a rank was lost", RESUME_ME)), ""),
    ],
)
def test_each_rank_of_a_slurm_job_leaves_the_error_that_a_person_must_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, marked: str
) -> None:
    def fail(*_arguments: object) -> int:
        raise error

    monkeypatch.setattr(train, "read_launch", lambda: Launch("slurm", 1, 2, 1, 2, 1, "slurm-7.0-0"))
    monkeypatch.setattr(train, "_train", fail)
    (tmp_path / "models").mkdir()
    with pytest.raises(type(error)):
        train.train(Settings(run=tmp_path, urls=["none"]), "")
    mark = failed_mark(tmp_path / "models", "slurm-7.0-0")
    assert (mark.read_text() if mark.exists() else "") == marked


def test_help_shows_examples_and_is_quick(command: Command) -> None:
    for verb in ("train", "evaluate", "generate"):
        result = command(f"training.{verb}", "--help", timeout=60)
        assert result.returncode == 0
        assert f"python -m training.{verb} --" in result.stdout


def test_a_model_that_is_too_large_stops_all_ranks_in_one_line_before_anything_is_written(tmp_path: Path) -> None:
    model = {"n_layer": 9000, "n_embd": 2**14}  # 29 trillion parameters
    config = make_run(tmp_path, model=model, parallel={"data": 2})
    first, second = launch(2, "training.train", "--config", config, "--model", "tiny")
    assert (first.returncode, second.returncode) == (2, 2)
    (line,) = (first.stderr + second.stderr).splitlines()
    assert re.match(
        r"error: models\.tiny needs [\d.]+ GiB in 2 processes and there are .*train\.allow_tight=true", line
    )
    assert not list((tmp_path / "models/tiny").glob("*.*"))


def test_a_layout_that_the_planner_chose_is_kept_when_the_run_goes_on(tmp_path: Path) -> None:
    train = {"micro_batch_size": 0, "iterations": 2}
    config = make_run(tmp_path, parallel={"auto": True}, train=train, cluster={"tasks_per_node": 2})
    command = ("training.train", "--config", config, "--model", "tiny")

    def layout() -> Experiment:
        return load_settings(tmp_path / "models/tiny/settings.yaml").models["tiny"]

    assert "on 2 processes, chosen by the planner" in launch_ok(2, *command)[0].stderr
    chosen = layout()
    assert (chosen.parallel.auto, chosen.world_size, chosen.train.global_batch_size) == (False, 2, 8)
    # a choice that the planner would not make shows that it is not asked again
    other = ("parallel.tensor=2", "train.recompute=full", "parallel.auto=false")
    launch_ok(2, *command, *other, "train.iterations=3")
    assert layout().parallel.tensor == 2
    first, second = launch_ok(2, *command, "train.iterations=4")
    assert f"as in {tmp_path}/models/tiny/settings.yaml" in first.stderr and second.stderr == ""
    assert "resumed from" in first.stdout
    assert (layout().parallel.tensor, layout().train.recompute) == (2, "full")
    # with another number of processes it is planned again
    (alone,) = launch_ok(1, *command, "train.iterations=5")
    assert "on 1 process, chosen by the planner; the run had pipeline 1 x data 1 x tensor 2 = 2" in alone.stderr
    assert layout().world_size == 1


def test_a_job_of_another_size_than_was_asked_for_stops_in_one_line(tmp_path: Path) -> None:
    config = make_run(tmp_path, parallel={"auto": True, "gpus": 4}, train={"micro_batch_size": 0})
    command = ("training.train", "--config", config, "--model", "tiny")
    errors = "".join(result.stderr for result in launch(2, *command))
    assert errors == (
        "error: models.tiny.parallel: auto over 4 processes, but 2 were started; start 4 "
        "(python -m cluster.submit does) or change these keys\n"
    )
