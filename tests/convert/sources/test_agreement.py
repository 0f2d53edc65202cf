"""Files that do not belong together are refused before anything is written."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError
from convert.assemble import assemble
from convert.files.stored import LoadedTensor
from convert.sources.agreement import check_distinct
from convert.sources.find import open_source
from convert.sources.options import Options
from tests.convert.deepspeed_files import Run, write_tag
from tests.convert.encoded import SMALL, truth
from tests.convert.megatron_files import Layout, write
from tests.convert.sources import torch_dist_files

OPTIONS = Options(num_heads=SMALL.n_head, vocab_size=SMALL.vocab_size)


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (
            lambda folder: write(folder, Layout("core", 3.0, tensor=2)),
            "mp_rank_00/model_optim_rng.pt",
            "mp_rank_01/model_optim_rng.pt",
        ),
        (
            lambda folder: write(folder, Layout("core", 3.0, pipeline=4)),
            "mp_rank_00_001/model_optim_rng.pt",
            "mp_rank_00_002/model_optim_rng.pt",
        ),
        (
            lambda folder: torch_dist_files.write_folder(folder, truth(), tp=4).close(),
            "__2_0.distcp",
            "__3_0.distcp",
        ),
        (
            lambda folder: write_tag(folder, Run(3)),
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        ),
    ],
)
def test_a_file_that_was_copied_over_that_of_another_rank_is_named(
    make: Callable[[Path], object], one: str, other: str, tmp_path: Path
) -> None:
    folder = tmp_path / "iter_0000100"
    make(folder)
    assemble(open_source(folder, OPTIONS), "h.3.attn.c_attn.weight")
    shutil.copyfile(folder / one, folder / other)
    with pytest.raises(CheckpointError, match=f"the weights in .*{other} are those in .*{one}: one file was copied"):
        assemble(open_source(folder, OPTIONS), "h.3.attn.c_attn.weight")


def test_equal_constants_are_no_copies() -> None:
    check_distinct([LoadedTensor(torch.zeros(3, 2)), LoadedTensor(torch.zeros(3, 2))])
