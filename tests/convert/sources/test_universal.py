"""DeepSpeed's universal checkpoints."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.sources.options import Options
from convert.sources.source import QKV
from convert.sources.universal import matches, open_folder
from tests.convert.deepspeed_files import ITERATION, SAMPLES, STEP, Run, edit, weights
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.sources import checks
from tests.convert.sources.checks import merged
from tests.convert.universal_files import write_universal

refused = partial(checks.refused, open_folder)
HEADS = Options(num_heads=SMALL.n_head)
ONE = replace(SMALL, n_layer=1)
REPLICATED = [f"tied_modules.embed.{kind}_embeddings.weight" for kind in ("word", "position")]
PATTERNS = {"universal_checkpoint_info": {"pipeline_replicated_parameter_patterns": REPLICATED}}


@pytest.mark.parametrize(
    "run",
    [
        Run(1, data=2),
        Run(3, data=3, names="megatron"),
        Run(1, 2, 2, "megatron", 0),
        Run(1, 4, 2, "megatron", 1),
        Run(1, 2, 2, "megatron", pipeline=4, state=PATTERNS),
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
        assert_equal(merged(source, kind), {name: tensor * factor for name, tensor in truth().items()})
    assert (source.step, source.iteration, source.consumed_samples) == (STEP, ITERATION, SAMPLES)
    assert source.model == SMALL
    assert source.qkv == QKV(run.version or 0 if run.megatron else 0, run.tensor)
    assert not any("lm_head" in str(path) for path in source.files)  # the embedding's second name


def test_position_embeddings_that_may_be_those_of_the_last_stage_are_refused(tmp_path: Path) -> None:
    folder = write_universal(tmp_path / "tag", Run(1, names="megatron", pipeline=2))
    refused(folder, "position_embeddings.weight", "last pipeline stage", num_heads=8)


def test_weights_without_moments_leave_all_moments(tmp_path: Path) -> None:
    folder = write_universal(tmp_path / "tag", Run(1, model=ONE))
    (folder / "zero" / "transformer.wpe.weight" / "exp_avg.pt").unlink()
    source = open_folder(folder, HEADS)
    assert not source.moments and source.step is None and "moments" in source.notes[-1]


def test_the_vocabulary_of_the_universal_information(tmp_path: Path) -> None:
    """Without it, 50304 rows would be taken as GPT-2's 50257."""
    model = replace(SMALL, n_layer=1, n_embd=8, n_inner=8, n_head=2, n_positions=4, vocab_size=50304)
    state = {"universal_checkpoint_info": {"original_vocab_size": 50304}}
    folder = write_universal(tmp_path / "tag", Run(1, names="megatron", args=False, model=model, state=state))
    assert open_folder(folder, Options(num_heads=2)).model.vocab_size == 50304


WPE = "zero/transformer.wpe.weight/fp32.pt"
STEP_FILE, ROTARY = "zero/transformer.wpe.weight/step.pt", "zero/transformer.h.0.rotary.weight"
TWO = Run(1, tensor=2, names="megatron")
SECOND = "mp_rank_01_model_states.pt"


def changed(file: str, change: Callable[[Any], Any]) -> Callable[[Path], object]:
    return lambda folder: edit(folder / file, change)


MIXED: list[tuple[Run, Callable[[Path], object], list[str]]] = [
    (Run(1), lambda folder: shutil.rmtree((folder / WPE).parent), [WPE]),
    (Run(1), lambda folder: (folder / "mp_rank_00_model_states.pt").unlink(), ["mp_rank_00_model_states.pt"]),
    (TWO, lambda folder: (folder / SECOND).unlink(), [SECOND]),
    (TWO, changed(SECOND, lambda content: content.update(iteration=9)), [SECOND, "iteration is 9"]),
    (Run(1), lambda folder: torch.save(torch.tensor(7.0), folder / STEP_FILE), [STEP_FILE, "step 7", "118"]),
    (Run(1), lambda folder: shutil.copytree((folder / WPE).parent, folder / ROTARY), [ROTARY]),
    (Run(1), changed(WPE, lambda content: {"cat_dim": 0}), [WPE, "param"]),
    (Run(1), changed(WPE, lambda content: content.update(sub_param_shape=3)), [WPE]),
    (
        Run(1),
        changed("zero/transformer.h.0.ln_2.weight/fp32.pt", lambda content: {"param": content["param"].flip(0)}),
        ["row 31", "'h.0.ln_2.weight'", "round_robin_gradients"],
    ),
    (Run(3), lambda folder: torch.save(torch.zeros(5), folder / WPE), [WPE, "5 elements"]),
    (Run(1), changed(WPE, lambda content: content.update(param=torch.zeros(24, 16))), ["'wpe.weight'", "[24, 16]"]),
]


@pytest.mark.parametrize(("run", "damage", "parts"), MIXED, ids=[" ".join(parts) for _, _, parts in MIXED])
def test_files_that_do_not_belong_together_are_refused_by_name(
    tmp_path: Path, run: Run, damage: Callable[[Path], object], parts: list[str]
) -> None:
    folder = write_universal(tmp_path / "tag", replace(run, model=ONE))
    damage(folder)
    refused(folder, *parts, num_heads=8)
