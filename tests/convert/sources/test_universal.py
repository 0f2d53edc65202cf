"""DeepSpeed's universal checkpoints."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from convert.arguments import Options
from convert.sources.find import open_source
from convert.sources.source import QKV
from convert.sources.universal import matches, open_folder
from tests.convert.deepspeed_files import ITERATION, SAMPLES, STEP, Run
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.sources import checks
from tests.convert.sources.checks import merged
from tests.convert.universal_files import write_universal

refused = partial(checks.refused, open_source)
HEADS = Options(num_heads=SMALL.n_head)
ONE = replace(SMALL, n_layer=1)
REPLICATED = [f"tied_modules.embed.{kind}_embeddings.weight" for kind in ("word", "position")]
PATTERNS = {"universal_checkpoint_info": {"pipeline_replicated_parameter_patterns": REPLICATED}}


@pytest.mark.parametrize(
    "run",
    [
        Run(1, data=2),
        Run(3, data=3, names="megatron"),
        Run(1, 4, 2, "megatron", 1),
        Run(1, 2, 2, "megatron", version=0, pipeline=2, state=PATTERNS),
    ],
    ids=lambda run: f"{run.names}-zero{run.stage}-tensor{run.tensor}-version{run.version}-pipeline{run.pipeline}",
)
def test_weights_and_moments(tmp_path: Path, run: Run) -> None:
    folder = write_universal(tmp_path / "global_step120_universal", run)
    assert matches(folder)
    source = open_folder(folder, HEADS)
    assert_equal(merged(source), truth())
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


WPE = "zero/transformer.wpe.weight/fp32.pt"
LN_2 = "zero/transformer.h.0.ln_2.weight/fp32.pt"


@pytest.mark.parametrize(
    ("stage", "file", "content", "parts"),
    [
        (1, WPE, {"cat_dim": 0}, [WPE, "param"]),
        (1, WPE, {"param": torch.zeros(24, 16)}, ["'wpe.weight'", "[24, 16]"]),
        (3, WPE, torch.zeros(5), [WPE, "5 elements"]),
        (1, WPE.replace("fp32", "step"), torch.tensor(7.0), ["step.pt", "step is 7", "118"]),
        (1, LN_2, {"param": torch.arange(32.0)}, ["row 31", "'h.0.ln_2.weight'", "round_robin_gradients"]),
    ],
)
def test_a_file_of_another_save_is_refused_by_name(
    tmp_path: Path, stage: int, file: str, content: object, parts: list[str]
) -> None:
    folder = write_universal(tmp_path / "tag", Run(stage, model=ONE))
    torch.save(content, folder / file)
    refused(folder, *parts, num_heads=8)


@pytest.mark.parametrize("lost", [WPE, "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"])
def test_lost_files_are_named(tmp_path: Path, lost: str) -> None:
    folder = write_universal(tmp_path / "tag", Run(1, tensor=2, model=ONE))
    (folder / lost).unlink()
    refused(folder, lost, num_heads=8)
