"""Every layout is the single process, cut: same losses, same gradient norms, and each rank holds only its part."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.settings import ModelSettings
from tests.training.helpers import launch_ok, make_run
from tests.training.worker import steps
from training.distributed import World
from training.parallel import place

# float32 sums in another order: 1e-7 a step, which the optimiser amplifies; a wrong split is off by 1e-2 and more
TOLERANCE = 1e-4
DRY = {"dropout": 0.0}  # masks differ between layouts
ALONE = World(0, 1, torch.device("cpu"))


def run_layout(folder: Path, data: int, tensor: int, save_at: int = 0, **train: object) -> list[dict[str, Any]]:
    """The job's results by rank, in a fresh run folder or one that holds a checkpoint already."""
    config = make_run(folder, model=DRY, parallel={"data": data, "tensor": tensor}, train=train)
    if data * tensor == 1:
        return [steps(config, ALONE, save_at)]
    launch_ok(data * tensor, "tests.training.worker", config, folder / "seen", "--save-at", save_at)
    return [json.loads((folder / f"seen.{rank}.json").read_text()) for rank in range(data * tensor)]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The single process' run, with a checkpoint of iteration 2 of 4."""
    folder = tmp_path_factory.mktemp("single")
    return folder, run_layout(folder, 1, 1, save_at=2)[0]


@pytest.fixture(scope="module")
def tensor_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The same run over two tensor-parallel processes, with its checkpoint."""
    folder = tmp_path_factory.mktemp("tensor2")
    return folder, run_layout(folder, 1, 2, save_at=2)


def assert_same_course(seen: dict[str, Any], expected: dict[str, Any], first: int = 0) -> None:
    assert seen["loss"] == pytest.approx(expected["loss"][first:], rel=TOLERANCE)
    assert seen["valid"] == pytest.approx(expected["valid"], rel=TOLERANCE)
    assert seen["norm"] == pytest.approx(expected["norm"][first:], rel=TOLERANCE)


def assert_shapes(shapes: dict[str, list[int]], tensor: int) -> None:
    """Local shapes of a 32-wide model with 4 heads under `tensor` ranks; vocabulary 257 padded to 128 x tensor."""
    rows = -(-257 // (128 * tensor)) * 128  # rows of each rank
    assert shapes["wte.weight"] == [rows, 32]
    assert shapes["wpe.weight"] == [16, 32]
    assert shapes["h.1.attn.c_attn.weight"] == [3 * 32 // tensor, 32]
    assert shapes["h.1.attn.c_attn.bias"] == [3 * 32 // tensor]
    assert shapes["h.1.attn.c_proj.weight"] == [32, 32 // tensor]
    assert shapes["h.1.attn.c_proj.bias"] == [32]
    assert shapes["h.0.mlp.c_fc.weight"] == [128 // tensor, 32]
    assert shapes["h.0.mlp.c_proj.weight"] == [32, 128 // tensor]
    assert shapes["ln_f.weight"] == [32]


def test_the_single_process_learns(single: tuple[Path, dict[str, Any]]) -> None:
    losses = single[1]["loss"]
    assert losses[0] == pytest.approx(5.55, abs=0.05)  # ln 257
    assert losses[-1] < losses[0] - 0.1


def test_two_tensor_parallel_processes_equal_one(
    single: tuple[Path, dict[str, Any]], tensor_two: tuple[Path, list[dict[str, Any]]]
) -> None:
    for seen in tensor_two[1]:
        assert_same_course(seen, single[1])
        assert_shapes(seen["shapes"], tensor=2)


def test_two_data_parallel_processes_equal_one(single: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    for seen in run_layout(tmp_path, 2, 1):
        assert_same_course(seen, single[1])
        assert_shapes(seen["shapes"], tensor=1)


def test_two_by_two_processes_equal_one_also_where_documents_keep_apart(tmp_path: Path) -> None:
    """The masked targets differ in number from rank to rank and from micro-batch to micro-batch."""
    apart = {"reset_position_ids": True, "eod_mask_loss": True}
    (single,) = run_layout(tmp_path / "1", 1, 1, **apart)
    for seen in run_layout(tmp_path / "4", 2, 2, **apart):
        assert_same_course(seen, single)
        assert_shapes(seen["shapes"], tensor=2)


def copy_checkpoint(source: Path, target: Path) -> None:
    checkpoint = source / "models" / "tiny" / "iter_0000002"
    copy = target / "models" / "tiny" / "iter_0000002"
    copy.mkdir(parents=True)
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())


def test_a_checkpoint_of_two_tensor_ranks_continues_on_one_process(
    single: tuple[Path, dict[str, Any]], tensor_two: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    copy_checkpoint(tensor_two[0], tmp_path)
    assert_same_course(run_layout(tmp_path, 1, 1)[0], single[1], first=2)


def test_a_checkpoint_of_one_process_continues_on_two_tensor_ranks(
    single: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    copy_checkpoint(single[0], tmp_path)
    for seen in run_layout(tmp_path, 1, 2):
        assert_same_course(seen, single[1], first=2)
        assert_shapes(seen["shapes"], tensor=2)


def test_place_fills_missing_vocabulary_rows_with_zeros() -> None:
    settings = ModelSettings(n_layer=1, n_head=1, n_embd=2, vocab_size=3)
    target = torch.full((4, settings.n_embd), 7.0)
    place(target, torch.ones(settings.vocab_size, settings.n_embd))
    assert target.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
