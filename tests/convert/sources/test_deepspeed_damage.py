"""DeepSpeed's checkpoints that are damaged, mixed or planted."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError
from convert.sources.deepspeed import open_folder
from convert.sources.options import Options
from tests.convert.deepspeed_files import Run, deepspeed_classes, edit, rounded, weights, write_tag
from tests.convert.encoded import SMALL, assert_equal, truth

HEADS = Options(num_heads=SMALL.n_head)
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def unlink(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut_off(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-4000])

    return damage


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / name, change)


def optimizer(content: Any) -> Any:
    return content["optimizer_state_dict"]


def shorten(content: Any) -> None:
    groups = optimizer(content)["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:-40].clone()


def later(content: Any) -> None:
    """The optimizer files of another iteration."""
    groups = optimizer(content)["single_partition_of_fp32_groups"]
    groups[0] = groups[0] * 1.05


def exchange(content: Any) -> None:
    """Two matrices of the same shape change places."""
    group = dict(content["param_shapes"][0])
    keys = list(group)
    first, second = keys.index("transformer.h.0.mlp.c_fc.weight"), keys.index("transformer.h.1.mlp.c_fc.weight")
    keys[first], keys[second] = keys[second], keys[first]
    content["param_shapes"][0] = {key: group[key] for key in keys}


@pytest.mark.parametrize(
    ("run", "damage", "file", "problem"),
    [
        (Run(2), unlink(MODEL), MODEL, "missing"),
        (Run(2, tensor=2), unlink(MODEL), MODEL, "missing"),
        (Run(0, tensor=2), unlink("mp_rank_01_model_states.pt"), "mp_rank_01_model_states.pt", "missing of 2 mp_rank"),
        (Run(2), unlink(OPTIMIZER), OPTIMIZER, "missing"),
        (
            Run(2, data=3),
            unlink(OPTIMIZER.replace("0", "2", 1)),
            OPTIMIZER.replace("0", "2", 1),
            "missing of 3 data ranks",
        ),
        (
            Run(3),
            unlink("zero_pp_rank_1_mp_rank_00_model_states.pt"),
            OPTIMIZER.replace("0", "1", 1),
            "model file of its rank",
        ),
        (Run(3), unlink("zero_pp_rank_1_mp_rank_00_optim_states.pt"), OPTIMIZER.replace("0", "1", 1), "missing of 2"),
        (
            Run(2, tensor=2),
            lambda folder: [path.unlink() for path in folder.glob("*mp_rank_01_optim*")],
            "mp_rank_01_model_states.pt",
            "optimizer file of its rank is missing",
        ),
        (
            Run(2),
            lambda folder: shutil.copy(folder / OPTIMIZER, folder / f"bf16_{OPTIMIZER}"),
            OPTIMIZER,
            "same rank as bf16_zero_pp",
        ),
        (
            Run(2),
            lambda folder: shutil.copy(folder / OPTIMIZER, folder / OPTIMIZER.replace("0", "2", 1)),
            OPTIMIZER.replace("0", "2", 1),
            "has 2 data ranks; remove",
        ),
        (
            Run(0),
            lambda folder: shutil.copy(folder / MODEL, folder / "mp_rank_01_model_states.pt"),
            "mp_rank_01_model_states.pt",
            "has 1 model-parallel ranks; remove",
        ),
        (
            Run(3),
            lambda folder: shutil.copy(folder / f"zero_pp_rank_0_{MODEL}", folder / MODEL),
            f"zero_pp_rank_0_{MODEL}",
            "same rank as mp_rank_00",
        ),
        (Run(2), cut_off(MODEL), MODEL, "cut off"),
        (Run(2), cut_off(OPTIMIZER), OPTIMIZER, "cut off"),
        (Run(2), lambda folder: (folder / OPTIMIZER).write_bytes(b""), OPTIMIZER, "cut off"),
        (
            Run(0, tensor=2),
            changed("mp_rank_01_model_states.pt", lambda c: c.update(global_steps=80)),
            "mp_rank_01_model_states.pt",
            "global_steps is 80, but 120 in mp_rank_00",
        ),
        (Run(2, data=3), changed(OPTIMIZER, lambda c: c.update(ds_version="0.9.2")), OPTIMIZER, "ds_version is 0.9.2"),
        (
            Run(2, data=3),
            changed(
                OPTIMIZER.replace("0", "2", 1),
                lambda c: (
                    [g.update(step=torch.tensor(80.0)) for g in optimizer(c)["base_optimizer_state"]["state"].values()]
                    and None
                ),
            ),
            OPTIMIZER.replace("0", "2", 1),
            "step of the optimizer is 80, but 118 in zero_pp_rank_0",
        ),
        (
            Run(2),
            changed(OPTIMIZER, lambda c: optimizer(c).update(partition_count=[4, 4])),
            "zero_pp_rank_2",
            "missing of 4",
        ),
        (Run(2), changed(OPTIMIZER, shorten), OPTIMIZER, "elements, but the parameters have"),
        (
            Run(3),
            changed(OPTIMIZER, lambda c: optimizer(c)["fp32_flat_groups"].pop()),
            OPTIMIZER,
            "number of groups",
        ),
        (
            Run(2, data=1),
            changed(OPTIMIZER, later),
            "global_step120",
            "differs by .*of the model files, more than rounding",
        ),
        (Run(2), changed(MODEL, exchange), "global_step120", "row 31 of tensor 'h.[01].mlp.c_fc.weight' differs by"),
        (Run(2), changed(OPTIMIZER, lambda c: {"a": 1}), OPTIMIZER, "has no optimizer_state_dict"),
        (Run(2), changed(MODEL, lambda c: {"a": 1}), MODEL, "has no module"),
        (
            Run(2),
            changed(MODEL, lambda c: c.update(param_shapes=c["param_shapes"][:1])),
            OPTIMIZER,
            "1 groups of parameters, the optimizer files have 2",
        ),
        (
            Run(0),
            changed(MODEL, lambda c: c["module"].update({"transformer.h.0.attn.rotary.weight": torch.ones(2)})),
            "global_step120",
            "unknown tensor 'transformer.h.0.attn.rotary.weight'",
        ),
        (
            Run(0),
            changed(MODEL, lambda c: c["module"].pop("transformer.h.1.ln_1.bias")),
            "global_step120",
            "'h.1.ln_1.bias' is missing",
        ),
        (
            Run(0, tensor=2),
            changed(MODEL, lambda c: c["module"].update({"transformer.h.0.mlp.c_fc.bias": torch.ones(2)})),
            "global_step120",
            "tensor 'h.0.mlp.c_fc.bias' has shape",
        ),
        (
            Run(2),
            changed(MODEL, lambda c: c["module"].update({"transformer.wpe.weight": torch.ones(2, 32)})),
            "global_step120",
            "in the model files and",
        ),
        (
            Run(0),
            changed(MODEL, lambda c: c.update(ds_config={"tensor_parallel": {"autotp_size": 2}})),
            "global_step120",
            "AutoTP.*save_16bit_model",
        ),
        (
            Run(0),
            lambda folder: (folder / "layer_0_expert_3_mp_rank_00_model_states.pt").touch(),
            "layer_0_expert_3_mp_rank_00_model_states.pt",
            "mixture of experts",
        ),
        (
            Run(3),
            lambda folder: [path.unlink() for path in folder.glob("*optim_states.pt")],
            "global_step120",
            "ZeRO 3 without float32 weights",
        ),
        (
            Run(1, names="megatron", pipeline=2),
            unlink("layer_05-model_00-model_states.pt"),
            "layer_05-model_00-model_states.pt",
            "missing",
        ),
        (
            Run(0, names="megatron", pipeline=2),
            unlink("layer_05-model_00-model_states.pt"),
            "global_step120",
            "no layer_05-model_.: a block",
        ),
        (
            Run(1, tensor=2, names="megatron", pipeline=2),
            unlink("layer_05-model_01-model_states.pt"),
            "layer_05-model_01-model_states.pt",
            "missing",
        ),
        (
            Run(0, names="megatron"),
            changed(MODEL, lambda c: setattr(c["args"], "swiglu", True)),
            "global_step120",
            "args.swiglu is True: the model is no GPT-2",
        ),
        (
            Run(0, names="megatron"),
            changed(MODEL, lambda c: setattr(c["args"], "num_layers", 5)),
            "global_step120",
            "args.num_layers is 5, but the tensors have 4",
        ),
    ],
)
def test_damaged_folders_are_refused_in_one_line_that_names_the_file(
    tmp_path: Path, run: Run, damage: Callable[[Path], Any], file: str, problem: str
) -> None:
    folder = write_tag(tmp_path / "global_step120", run)
    damage(folder)
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_folder(folder, HEADS)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    assert file in message, message


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER])
@pytest.mark.parametrize(
    "odd", [None, 5, "text", [3], {"a": "b"}, torch.ones(2, 2), Path("inert")], ids=lambda value: type(value).__name__
)
def test_values_of_unexpected_types_are_read_right_or_refused(tmp_path: Path, odd: Any, file: str) -> None:
    model = replace(SMALL, n_layer=1)
    folder = write_tag(tmp_path / "tag", Run(2, data=1, names="megatron", model=model))
    with deepspeed_classes():
        content = torch.load(folder / file, weights_only=False)
        states = content if file == MODEL else content["optimizer_state_dict"]
        for key, value in [*states.items()]:
            states[key] = odd
            torch.save(content, folder / file)
            states[key] = value
            try:
                source = open_folder(folder, replace(HEADS, vocab_size=model.vocab_size))
            except CheckpointError as error:
                assert str(folder) in str(error) and "\n" not in str(error)
            else:
                expected = truth(model) if "float32 masters" in source.layout else rounded(model)
                assert_equal(weights(source), expected, model)


class Planted:
    """Unpickled with pickle.load, it touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("run", "file"),
    [
        (Run(0), MODEL),
        (Run(2), OPTIMIZER),
        (Run(3), f"zero_pp_rank_1_{MODEL}"),
        (Run(0, names="megatron", pipeline=1), "layer_03-model_00-model_states.pt"),
    ],
)
def test_a_planted_pickle_does_not_run(tmp_path: Path, run: Run, file: str, zipped: bool) -> None:
    folder = write_tag(tmp_path / "global_step120", run)
    trap = tmp_path / "executed"

    with deepspeed_classes():
        content = torch.load(folder / file, weights_only=False)
        content["planted"] = Planted(trap)
        torch.save(content, folder / file, _use_new_zipfile_serialization=zipped)
        torch.load(folder / file, weights_only=False)  # the trap works
    assert trap.exists()
    trap.unlink()
    try:
        assert_equal(
            weights(open_folder(folder, HEADS)),
            truth() if run.stage else rounded(),
        )
    except CheckpointError as error:
        assert file in str(error)
    assert not trap.exists()
