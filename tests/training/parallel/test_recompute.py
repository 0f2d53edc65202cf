"""Recomputed layers and compiled ones give the same step."""

from pathlib import Path

import torch

from tests.training.helpers import make_run, open_session, settings_of, step_batches
from training.parallel.process_group import World
from training.parallel.recompute import recompute
from training.run_plan import make_plan
from training.step import train_step

ALONE = World(0, 1, torch.device("cpu"))


def course(folder: Path, dropout: float = 0.1, **train: object) -> list[float]:
    """The losses of three steps."""
    config = make_run(folder, model={"dropout": dropout}, train=train)
    session = open_session(make_plan(settings_of(config), "tiny"), ALONE)
    batches = step_batches(session, 0)
    return [train_step(session, iteration, next(batches), 0.01).loss for iteration in (1, 2, 3)]


def test_a_step_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    plain = course(tmp_path / "none")
    for kind in ("selective", "full"):
        assert course(tmp_path / kind, recompute=kind) == plain


def test_full_recompute_keeps_only_the_input_of_a_layer_and_selective_the_matrix_products() -> None:
    kept = {}
    for kind in ("none", "selective", "full"):
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.1))
        if kind != "none":
            recompute(layer, kind)
        x = torch.randn(8, 64, requires_grad=True)
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        weights = {parameter.data_ptr() for parameter in layer.parameters()}
        kept[kind] = sum(size for pointer, size in sizes.items() if pointer not in {*weights, x.data_ptr()})
    assert kept["full"] < kept["none"] and kept["selective"] < kept["none"]
