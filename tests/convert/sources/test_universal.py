"""DeepSpeed's universal checkpoints."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError
from convert.assemble import assemble
from convert.sources.options import Options
from convert.sources.source import QKV
from convert.sources.universal import matches, open_folder
from tests.convert.deepspeed_files import ITERATION, SAMPLES, STEP, Run, edit, weights, write_tag
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.universal_files import write_universal

HEADS = Options(num_heads=SMALL.n_head)
ONE = replace(SMALL, n_layer=1)
PATTERNS = {
    "universal_checkpoint_info": {
        "original_vocab_size": SMALL.vocab_size,
        "pipeline_replicated_parameter_patterns": [
            "tied_modules.embed.word_embeddings.weight",
            "tied_modules.embed.position_embeddings.weight",
        ],
    }
}


@pytest.mark.parametrize(
    "run",
    [
        Run(1, data=2),
        Run(3, data=2),
        Run(3, data=3, names="megatron"),
        *(Run(1, tensor, 2, "megatron", version) for tensor, version in [(1, 2), (2, 0), (4, 0), (4, 1), (2, 2)]),
        *(Run(1, tensor, 2, "megatron", pipeline=stages, state=PATTERNS) for tensor, stages in [(1, 2), (2, 4)]),
        Run(1, 2, 2, "megatron", version=0, pipeline=2, state=PATTERNS),
    ],
    ids=lambda run: f"{run.names}-zero{run.stage}-tensor{run.tensor}-version{run.version}-pipeline{run.pipeline}",
)
def test_weights_and_moments(tmp_path: Path, run: Run) -> None:
    folder = write_universal(tmp_path / "global_step120_universal", run)
    assert matches(folder)
    source = open_folder(folder, HEADS)
    assert_equal(weights(source), truth())
    for kind, factor in (("exp_avg", -1.0), ("exp_avg_sq", 0.25)):
        found = {name: assemble(source, name, tensor=tensor) for name, tensor in source.moments[kind].items()}
        assert_equal(found, {name: tensor * factor for name, tensor in truth().items()})
    assert (source.step, source.iteration, source.consumed_samples) == (STEP, ITERATION, SAMPLES)
    assert source.model == SMALL
    if run.megatron:
        assert source.qkv == QKV(run.version or 0, run.tensor)
    family = "Megatron" if run.megatron else "transformers"
    assert source.layout == f"DeepSpeed 0.19.8, universal, 52 parameters, names of {family}, float32 masters"


def test_position_embeddings_that_may_be_those_of_the_last_stage_are_refused(tmp_path: Path) -> None:
    folder = write_universal(tmp_path / "tag", Run(1, names="megatron", pipeline=2))
    with pytest.raises(CheckpointError, match=r"may be the unused copy of the last pipeline stage.*give the"):
        open_folder(folder, HEADS)


def test_other_folders_do_not_match(tmp_path: Path) -> None:
    assert not matches(write_tag(tmp_path / "tag", Run(1)))
    (tmp_path / "tag" / "zero").mkdir()
    assert not matches(tmp_path / "tag")


def test_the_second_name_of_the_embedding_is_left_out(tmp_path: Path) -> None:
    folder = write_universal(tmp_path / "tag", Run(1))
    assert (folder / "zero" / "lm_head.weight" / "fp32.pt").is_file()
    source = open_folder(folder, HEADS)
    assert source.model.tied
    assert not any("lm_head" in str(path) for path in source.files)


def test_weights_without_moments_leave_all_moments(tmp_path: Path) -> None:
    folder = write_universal(tmp_path / "tag", Run(1))
    (folder / "zero" / "transformer.wpe.weight" / "exp_avg.pt").unlink()
    source = open_folder(folder, HEADS)
    assert not source.moments and source.step is None
    assert any("moments" in note for note in source.notes)


def test_the_vocabulary_of_the_universal_information(tmp_path: Path) -> None:
    """Without it, 50304 rows would be taken as GPT-2's 50257."""
    model = replace(SMALL, n_layer=1, n_embd=8, n_inner=8, n_head=2, n_positions=4, vocab_size=50304)
    run = Run(
        1,
        names="megatron",
        args=False,
        model=model,
        state={"universal_checkpoint_info": {"original_vocab_size": 50304}},
    )
    source = open_folder(write_universal(tmp_path / "tag", run), Options(num_heads=2))
    assert source.model.vocab_size == 50304


WPE = "zero/transformer.wpe.weight/fp32.pt"


def changed(file: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / file, change)


def cut_off(file: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / file).write_bytes((folder / file).read_bytes()[:-600])

    return damage


@pytest.mark.parametrize(
    ("run", "damage", "file", "problem"),
    [
        (Run(1), lambda folder: shutil.rmtree((folder / WPE).parent), WPE, "missing"),
        (Run(1), lambda folder: (folder / WPE).unlink(), WPE, "missing"),
        (Run(1), cut_off(WPE), WPE, "cut off"),
        (Run(1), lambda folder: (folder / "mp_rank_00_model_states.pt").unlink(), "mp_rank_00", "missing"),
        (
            Run(1, tensor=2, names="megatron"),
            lambda folder: (folder / "mp_rank_01_model_states.pt").unlink(),
            "mp_rank_01_model_states.pt",
            "missing of 2",
        ),
        (
            Run(1, tensor=2, names="megatron"),
            changed("mp_rank_01_model_states.pt", lambda c: c.update(iteration=9)),
            "mp_rank_01_model_states.pt",
            "iteration is 9",
        ),
        (
            Run(1),
            lambda folder: torch.save(torch.tensor(7.0), (folder / WPE).with_name("step.pt")),
            "zero/transformer.wpe.weight/step.pt",
            "is of step 7, but the other parameters are of 118",
        ),
        (
            Run(1),
            lambda folder: shutil.copytree((folder / WPE).parent, folder / "zero" / "transformer.h.0.rotary.weight"),
            "zero/transformer.h.0.rotary.weight",
            "an unknown tensor",
        ),
        (Run(1), changed(WPE, lambda c: {"cat_dim": 0}), WPE, "has no tensor under param"),
        (Run(1), changed(WPE, lambda c: c.update(sub_param_shape=3)), WPE, "merged from several parameters"),
        (
            Run(1),
            changed("zero/transformer.h.0.ln_2.weight/fp32.pt", lambda c: c.update(param=c["param"].flip(0))),
            "tag",
            "row 31 of tensor 'h.0.ln_2.weight' differs by .*round_robin_gradients",
        ),
        (Run(3), lambda folder: torch.save(torch.zeros(5), folder / WPE), WPE, "has 5 elements"),
        (
            Run(1),
            changed(WPE, lambda c: c.update(param=torch.zeros(24, 16))),
            "tag",
            r"tensor 'wpe.weight' has shape \[24, 16\]",
        ),
    ],
)
def test_damaged_folders_are_refused_in_one_line_that_names_the_file(
    tmp_path: Path, run: Run, damage: Callable[[Path], Any], file: str, problem: str
) -> None:
    folder = write_universal(tmp_path / "tag", replace(run, model=ONE))
    damage(folder)
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_folder(folder, HEADS)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message and file in message, message


class Planted:
    """Unpickled with pickle.load, it touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "file", ["fp32.pt", "exp_avg.pt", "step.pt", "../optimizer_state.pt", "../../mp_rank_00_model_states.pt"]
)
def test_a_planted_pickle_does_not_run(tmp_path: Path, file: str, zipped: bool) -> None:
    folder = write_universal(tmp_path / "tag", Run(1, model=ONE))
    path, trap = (folder / WPE).parent / file, tmp_path / "executed"
    content = torch.load(path, weights_only=False)
    content = {**content, "planted": Planted(trap)} if isinstance(content, dict) else Planted(trap)
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    torch.load(path, weights_only=False)  # the trap works
    assert trap.exists()
    trap.unlink()
    try:
        assert_equal(weights(open_folder(folder, HEADS)), truth(ONE), ONE)
    except CheckpointError as error:
        assert Path(file).name in str(error)
    assert not trap.exists()
