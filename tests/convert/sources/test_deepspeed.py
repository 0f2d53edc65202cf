"""DeepSpeed's checkpoints: ZeRO stages, tensor ranks, pipelines, names, and mixed-up folders."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CheckpointError
from convert.arguments import Options
from convert.sources.deepspeed import matches, open_folder
from convert.sources.source import QKV, Sharded
from convert.sources.zero import cut_group, cut_stage3
from tests.convert.conftest import Made
from tests.convert.deepspeed_files import ITERATION, SAMPLES, STEP, Run, edit, inside, partition, rounded
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.helpers import LoadedTensor, exchange, merged, refused
from training.checkpoint.files import StoredTensor

HEADS = Options(num_heads=SMALL.n_head)
SIZES = replace(HEADS, vocab_size=SMALL.vocab_size)
MODEL, MODEL_1 = "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"
OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
SECOND, THIRD = OPTIMIZER.replace("0", "1", 1), OPTIMIZER.replace("0", "2", 1)

PIPELINE = Run(1, names="megatron", pipeline=2)
FROZEN = ("wpe.weight", "h.2.mlp.c_fc.bias")
UNTRAINED = tuple(f"transformer.{name}" for name in FROZEN)


@pytest.mark.parametrize(
    "run",
    [
        Run(0, 2),
        Run(0, 4, names="megatron", version=1),
        Run(1, 2, 3, bf16_optimizer=True),
        Run(1, 1, 3, frozen=UNTRAINED),
        Run(1, 4, 1, "megatron", 0),
        Run(1, 4, 2, "megatron", pipeline=4, bf16_optimizer=True),
        Run(0, 2, 2, "megatron", pipeline=2),
        Run(2, 2, 3, "megatron", 1),
        Run(3, 2, 2, "megatron", 3),
        Run(3, model=replace(SMALL, tied=False)),
    ],
    ids=lambda run: f"{run.names}-zero{run.stage}-{run.tensor}x{run.data}x{run.pipeline}-frozen{len(run.frozen)}",
)
def test_every_layout_is_read(made: Made, run: Run) -> None:
    source = open_folder(made(run), SIZES)
    low, high = rounded(run.model), truth(run.model)
    expected = high | {name: low[name] for name in FROZEN if run.frozen} if run.stage else low
    assert matches(source.path)
    assert_equal(merged(source), expected, run.model)
    assert source.model == run.model
    assert source.qkv == QKV(run.version if run.megatron else 0, run.tensor)  # type: ignore[arg-type]
    assert (source.iteration, source.consumed_samples) == (ITERATION, SAMPLES)
    assert any(note.startswith("2 tensors") for note in source.notes) == bool(run.frozen)
    if not run.stage or run.frozen:
        assert not source.has_moments("adamw")
        return
    assert source.has_moments("adamw") and source.step == STEP
    for kind, factor in (("exp_avg", -1.0), ("exp_avg_sq", 0.25)):
        assert_equal(merged(source, kind), {name: tensor * factor for name, tensor in high.items()}, run.model)
    if run.pipeline:
        copy = source.tensors["wte.weight"].copies[f"pipeline stage {run.pipeline - 1}"]
        assert torch.equal(copy.read(), source.tensors["wte.weight"].read())


def test_the_version_of_the_qkv_rows_is_recorded_or_given(made: Made) -> None:
    folder = made(Run(1, tensor=2, names="megatron", version=None), "none")
    refused(folder, "--qkv-version", num_heads=8)
    assert open_folder(folder, replace(HEADS, qkv_version=2)).qkv == QKV(2)
    refused(made(PIPELINE, "recorded"), "--qkv-version is 0", "checkpoint_version is 2", qkv_version=0)
    theirs = made(Run(2), "theirs")
    refused(theirs, "--qkv-version is 2", num_heads=8, qkv_version=2)
    refused(theirs, "--num-heads")


def test_model_files_alone_give_16_bit_weights_and_a_note(made: Made) -> None:
    folder = made(Run(2))
    without("*optim_states.pt")(folder)
    source = open_folder(folder, HEADS)
    assert_equal(merged(source), rounded())
    assert any("_optim_states.pt" in note for note in source.notes)


def test_linear_layers_under_names_of_transformers(made: Made) -> None:
    """nanoGPT's names are those of transformers, its matrices are [out, in]."""
    folder = made(Run(0, tensor=2))

    def turn(content: Any) -> None:
        for key, tensor in content["module"].items():
            if ".c_" in key and tensor.dim() == 2:
                content["module"][key] = tensor.t().contiguous()

    inside("*", turn)(folder)
    source = open_folder(folder, SIZES)
    assert not source.conv1d
    assert_equal(merged(source), rounded())


def test_embeddings_that_each_tensor_rank_has_as_a_whole_need_the_size_of_the_vocabulary(made: Made) -> None:
    folder = made(Run(0, tensor=2))
    whole = dict.fromkeys(("transformer.wte.weight", "lm_head.weight"), truth()["wte.weight"])
    inside("*", lambda content: content["module"].update(whole))(folder)
    with pytest.raises(CheckpointError, match=r"mp_rank_01.*mp_rank_00"):
        merged(open_folder(folder, HEADS))
    assert torch.equal(merged(open_folder(folder, SIZES))["wte.weight"], truth()["wte.weight"])


@pytest.mark.parametrize("stage", [1, 3])
def test_files_of_ranks_that_were_exchanged_are_refused_by_name(made: Made, stage: int) -> None:
    folder = made(Run(stage, 2, 2, "megatron"))
    paths = sorted(folder.glob("*_model_states.pt"))
    for path in paths:
        data, model = (int(path.name.partition(key)[2].partition("_")[0] or 0) for key in ("pp_rank_", "mp_rank_"))
        edit(path, lambda content, rank=model + 2 * data: setattr(content["args"], "rank", rank))  # type: ignore[misc]
    assert_equal(merged(open_folder(folder, SIZES)), truth())
    exchange(*paths[:2])
    refused(folder, str(paths[0]), "rank 1, which is tensor rank 1")


Change = Callable[[Path], object]


def without(pattern: str) -> Change:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def copied(file: str, other: str) -> Change:
    return lambda folder: shutil.copy(folder / file, folder / other)


def state(content: Any) -> Any:
    return content["optimizer_state_dict"]


def first_step(content: Any) -> torch.Tensor:
    step: torch.Tensor = state(content)["base_optimizer_state"]["state"][0]["step"]
    return step


ROTARY = {"h.0.attn.rotary.weight": torch.ones(2)}
MIXED: list[tuple[Run, Change, list[str]]] = [
    (Run(0, 2), without(MODEL_1), [MODEL_1, "2 mp_rank"]),
    (Run(2, 2), without("*mp_rank_01_optim*"), ["zero_pp_rank_0_mp_rank_01_optim_states.pt", "2 mp_rank"]),
    (Run(3), without("*optim_states.pt"), ["ZeRO 3"]),
    (PIPELINE, without("layer_05*"), ["layer_05-model_00-model_states.pt"]),
    (Run(2), copied(OPTIMIZER, THIRD), [THIRD, "2 data ranks"]),
    (Run(2), copied(MODEL, MODEL_1), [MODEL_1, "1 mp_rank"]),
    (Run(0), lambda folder: folder.rename(folder.with_name("global_step80")), ["iteration 120", "global_step120"]),
    (Run(0, 2), inside(MODEL, lambda c: c.update(global_steps=80)), ["global_steps is 120", "80", MODEL]),
    (Run(2, data=3), inside(THIRD, lambda c: first_step(c).fill_(80)), [THIRD, "80", "118", OPTIMIZER]),
    (Run(2), inside(OPTIMIZER, lambda c: state(c).update(partition_count=[4, 4])), [THIRD, "4 data ranks"]),
    (Run(3), inside(SECOND, lambda c: state(c)["fp32_flat_groups"].pop()), [SECOND, "number of groups"]),
    (Run(2), inside(OPTIMIZER, lambda c: state(c)["single_partition_of_fp32_groups"][0].mul_(1.02)), ["differs by"]),
    (Run(0), inside(MODEL, lambda c: c["module"].update(ROTARY)), ["attn.rotary"]),
    (Run(0), inside(MODEL, lambda c: c.update(ds_config={"tensor_parallel": {"autotp_size": 2}})), ["AutoTP"]),
]


@pytest.mark.parametrize(("run", "change", "parts"), MIXED, ids=[" ".join(parts) for *_, parts in MIXED])
def test_files_that_do_not_belong_together_are_refused_by_name(
    made: Made, tmp_path: Path, run: Run, change: Change, parts: list[str]
) -> None:
    change(made(run))
    (folder,) = tmp_path.iterdir()
    refused(folder, *parts, num_heads=8)


def in_file(file: IO[bytes], tensor: torch.Tensor) -> StoredTensor:
    """The tensor at the end of a file."""
    stored = StoredTensor(Path(file.name), file.tell(), tensor.dtype, tuple(tensor.shape))
    file.write(tensor.numpy().tobytes())
    file.flush()
    return stored


SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=5)


@given(groups=st.lists(SHAPES, max_size=3), ranks=st.integers(1, 7), padding=st.integers(0, 3), lean=st.booleans())
@pytest.mark.parametrize("stage", [1, 3])
def test_partitioned_parameters_are_read_back(
    stage: int, groups: list[list[list[int]]], ranks: int, padding: int, lean: bool
) -> None:
    padding *= stage == 1  # elements after each parameter
    tensors = [{f"{n}.{i}": torch.rand(shape) + 1 for i, shape in enumerate(group)} for n, group in enumerate(groups)]
    shapes = [{name: tuple(tensor.shape) for name, tensor in group.items()} for group in tensors]
    with NamedTemporaryFile() as file:
        parameters: dict[str, Sharded] = {}
        parts = []
        for group in tensors:
            padded = [torch.cat([tensor.flatten(), torch.full((padding,), torch.nan)]) for tensor in group.values()]
            parts.append([in_file(file, part) for part in partition(padded, stage, ranks, lean)])
        if stage == 3:
            merged = {name: shape for group in shapes for name, shape in group.items()}
            parameters = cut_stage3(merged, [[part[rank] for part in parts] for rank in range(ranks)])
        else:
            for names, part in zip(shapes, parts, strict=True):
                parameters |= cut_group(names, part, [padding] * len(names))
        for name, tensor in ((name, tensor) for group in tensors for name, tensor in group.items()):
            middle = len(tensor) // 2
            assert torch.equal(parameters[name].read(), tensor)
            assert torch.equal(parameters[name].rows(middle, len(tensor)).read(), tensor[middle:])


@pytest.mark.parametrize("held", [10, 14])
def test_partitions_of_another_size_are_refused(held: int) -> None:
    parts = [LoadedTensor(torch.zeros(held // 2))] * 2  # 11 elements are 12 in two equal parts
    with pytest.raises(CheckpointError, match=f"hold {held} elements, but the parameters have 11"):
        cut_group({"a": (11,)}, parts)
    with pytest.raises(CheckpointError, match=f"hold {held} elements, but the parameters have 11"):
        cut_stage3({"a": (11,)}, [[part] for part in parts])
