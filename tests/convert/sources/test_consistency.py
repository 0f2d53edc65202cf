"""Damage in a file is refused with its name, or changes nothing; copies are compared by bit."""

import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import CheckpointError
from convert.arguments import Options
from convert.sources.consistency import ReplicaComparison, check_distinct, compare_replicas
from convert.sources.find import open_source
from convert.sources.source import Architecture, whole
from tests.convert.deepspeed_files import Run, write_tag
from tests.convert.encoded import assert_equal, truth
from tests.convert.helpers import LoadedTensor, merged, source_of
from tests.convert.megatron_files import Layout, write
from tests.convert.sources import torch_dist_files

TINY = Architecture(n_layer=2, n_head=4, n_embd=16, n_positions=8, n_inner=32, vocab_size=40)
OPTIONS = Options(num_heads=4, vocab_size=40)
FORMATS: dict[str, Callable[[Path], object]] = {
    "megatron": lambda folder: write(folder, Layout("core", 3.0, 2, 2, model=TINY)),
    "stages": lambda folder: write(folder, Layout("core", 3.0, pipeline=4, model=MODELS["stages"])),
    "torch_dist": lambda folder: torch_dist_files.write_folder(folder, truth(TINY), TINY, tp=4).close(),
    "zero0": lambda folder: write_tag(folder, Run(0, tensor=2, model=TINY)),
    "zero2": lambda folder: write_tag(folder, Run(2, tensor=2, names="megatron", model=TINY)),
    "zero3": lambda folder: write_tag(folder, Run(3, model=TINY)),
    "pipeline": lambda folder: write_tag(folder, Run(1, names="megatron", pipeline=2, model=TINY)),
}


MODELS = {"stages": replace(TINY, n_layer=4)}  # others are TINY


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each format."""
    folder = tmp_path_factory.mktemp("intact")
    for name, make in FORMATS.items():
        make(folder / name)
    return folder


def assert_right_or_refused(folder: Path, file: Path) -> None:
    """The weights are right, or one line names the file, or another of its rank if it is gone."""
    model = MODELS.get(folder.name, TINY)
    weights = truth(model)
    expected = {name: tensor.bfloat16() for name, tensor in weights.items()} if folder.name == "zero0" else weights
    try:
        assert_equal(merged(open_source(folder, OPTIONS)), expected, model)
    except CheckpointError as error:
        rank = file.parent.name if file.name == "model_optim_rng.pt" else file.name.partition("_model_states")[0]
        assert str(folder) in str(error) and rank in str(error) and "\n" not in str(error)
        # .metadata says where the parts of tensors are: if it is damaged, any other file may seem
        # to be
        assert file.name == ".metadata" or str(file) in str(error) or not file.exists()


@settings(max_examples=35)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    number=st.integers(0, 200),
    kind=st.sampled_from(["gone", "cut", "flipped", "flipped"]),
    place=st.floats(0, 1, exclude_max=True),
)
@example("torch_dist", 0, "flipped", 0.4099)  # the metadata has another position of a part of a tensor
def test_a_damaged_file_is_refused_by_name_or_changes_nothing(
    intact: Path, name: str, number: int, kind: str, place: float
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(intact / name, Path(temporary) / name))
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        file = files[number % len(files)]
        data = bytearray(file.read_bytes())
        at = int(len(data) * place)
        data[at] ^= 0x41
        if kind == "gone":
            file.unlink()
        else:
            file.write_bytes(data if kind == "flipped" else data[:at])
        assert_right_or_refused(folder, file)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("stages", "mp_rank_00_001/model_optim_rng.pt", "mp_rank_00_002/model_optim_rng.pt"),
        ("torch_dist", "__2_0.distcp", "__3_0.distcp"),
        ("zero3", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_file_that_was_copied_over_that_of_another_rank_is_named(
    intact: Path, tmp_path: Path, name: str, one: str, other: str
) -> None:
    folder = Path(shutil.copytree(intact / name, tmp_path / name))
    shutil.copyfile(folder / one, folder / other)
    with pytest.raises(CheckpointError) as error:
        merged(open_source(folder, OPTIONS))
    assert one in str(error.value) and other in str(error.value)


def test_equal_constants_are_no_copies() -> None:
    check_distinct([LoadedTensor(torch.zeros(3, 2)), LoadedTensor(torch.zeros(3, 2))])


def with_copies(tensor: torch.Tensor, *copies: torch.Tensor) -> ReplicaComparison:
    """Of a source with one tensor."""
    held = {f"tensor rank {rank}": whole(LoadedTensor(copy)) for rank, copy in enumerate(copies, 1)}
    sharded = replace(whole(LoadedTensor(tensor)), copies=held)
    return compare_replicas(source_of({}, tensors={"ln_f.bias": sharded}))


def test_drift_is_reported_with_tensor_holder_and_size() -> None:
    tensor = torch.zeros(5, 3)
    drifted = tensor.clone()
    drifted[4, 1], drifted[2, 2] = 0.25, -0.5
    replicas = with_copies(tensor, tensor.clone(), drifted)
    assert replicas.compared == 2 and replicas.drifted == {("ln_f.bias", "tensor rank 2"): (2, 0.5)}
    with pytest.raises(CheckpointError, match=r"'ln_f.bias' .*\[4\] .*tensor rank 1 .*\[3\]"):
        with_copies(torch.zeros(3), torch.zeros(4))


def test_every_bit_counts_and_what_is_not_finite_does_not_hide() -> None:
    zero, nan = torch.zeros(3), torch.tensor([0.0, math.nan, 0.0])
    assert not with_copies(nan, nan.clone()).drifted
    assert [*with_copies(zero, -zero).drifted.values()] == [(3, 0.0)]
    for first, second in ((zero, nan), (nan, zero)):
        ((elements, largest),) = with_copies(first, second).drifted.values()
        assert elements == 1 and math.isnan(largest)
    ((_, infinite),) = with_copies(zero, torch.tensor([0.0, math.inf, 1.0])).drifted.values()
    assert infinite == math.inf
    long = torch.zeros(5 << 20)  # more than the rows that are read at a time
    assert [*with_copies(long, torch.cat([long[1:], torch.ones(1)])).drifted.values()] == [(1, 1.0)]
