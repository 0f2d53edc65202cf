"""Files for Megatron-LM and Megatron-core equal what they write, and come back bit by bit."""

import json
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from common.errors import CheckpointError
from convert import merge_mp, to_megatron
from convert.sources.find import open_source
from convert.targets import torch_dist
from convert.targets.huggingface import write_folder
from convert.targets.megatron import write_v3
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.helpers import as_conv1d, merged, source_of
from tests.convert.megatron_files import Layout, content_of, folder_name, write
from tests.helpers import run_main
from tests.training.helpers import refusal

WRITERS: dict[str, Callable[..., None]] = {"core": write_v3, "torch_dist": torch_dist.write}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A Megatron run of two ranks."""
    write(tmp_path / "run" / "iter_0000100", Layout("core", 3.0, 2))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("tensor", "pipeline", "made"),
    [(4, 2, as_conv1d), (8, 4, source_of)],
)
def test_a_file_has_what_megatron_writes(tensor: int, pipeline: int, made: Callable[..., Any], tmp_path: Path) -> None:
    weights = {name: value.half() for name, value in truth().items()}
    source = made(weights, iteration=100, consumed_samples=6400)
    write_v3(source, tmp_path, tp=tensor, pp=pipeline)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "100"
    assert len(list(tmp_path.glob("iter_0000100/mp_rank_*/*"))) == tensor * pipeline
    layout = Layout("core", 3.0, tensor, pipeline, dtype=torch.float16, padding="last")
    for stage in range(pipeline):
        for rank in range(tensor):
            path = tmp_path / "iter_0000100" / folder_name(layout, stage, rank) / "model_optim_rng.pt"
            content = torch.load(path, weights_only=False)
            expected = content_of(layout, truth(), stage, rank)
            expected["model"].pop("output_layer._extra_state", None)  # Megatron sets it itself where it is missing
            assert content["iteration"] == 100 and content.keys() == expected.keys()
            assert content["checkpoint_version"] == 3.0
            assert_equal(content["model"], expected["model"])
            assert all(value.dtype == torch.float16 for value in content["model"].values())
            assert vars(expected["args"]).items() <= (vars(content["args"]) | {"rank": 0}).items()


def test_megatron_core_finds_its_keys_and_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP's own reader; what Megatron-LM's check of args reads; the file that names the backend."""
    monkeypatch.setattr(torch_dist, "_FILE", 1 << 16)  # several files
    torch_dist.write(source_of(truth(), iteration=100), tmp_path, tp=2, pp=2)
    folder = tmp_path / "iter_0000100"
    rows, stacked = torch.empty(512, 32), torch.empty(4, 32, 128)
    wanted = {"embedding.word_embeddings.weight": rows, "decoder.layers.mlp.linear_fc2.weight": stacked}
    with pytest.warns(UserWarning, match=r"torch\.distributed"):
        dcp_load(wanted, checkpoint_id=folder, no_dist=True)
    padding = truth()["wte.weight"][-1:].expand(212, -1)  # zeros would be likely tokens
    assert torch.equal(rows, torch.cat([truth()["wte.weight"], padding]))
    assert torch.equal(stacked, torch.stack([truth()[f"h.{layer}.mlp.c_proj.weight"] for layer in range(4)]))
    assert len(list(folder.glob("__0_*.distcp"))) > 3
    common = torch.load(folder / "common.pt", weights_only=False)
    assert (common["iteration"], common["checkpoint_version"], common["args"].padded_vocab_size) == (100, 3.0, 512)
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


@pytest.mark.parametrize(
    ("names", "changes", "sizes", "named"),
    [
        ("core", {}, (3, 1), "--tp 3"),
        ("core", {}, (1, 3), "--pp 3"),
        ("torch_dist", {"n_inner": 6}, (4, 1), "--tp 4"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(
    names: str, changes: Mapping[str, Any], sizes: tuple[int, int], named: str, tmp_path: Path
) -> None:
    model = replace(SMALL, **changes)
    with pytest.raises(CheckpointError, match=named) as caught:
        WRITERS[names](source_of(truth(model), model), tmp_path, tp=sizes[0], pp=sizes[1])
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


OTHER = replace(SMALL, tied=False, n_inner=96, activation="gelu", layer_norm_epsilon=1e-6, dropout=0.25)


@pytest.mark.parametrize(
    ("form", "tp", "pp", "dtype"),
    [
        ("v3", 4, 1, torch.float16),
        ("v3", 1, 1, torch.float32),
        ("v3", 2, 4, torch.bfloat16),
        ("torch_dist", 2, 2, torch.float32),
    ],
)
def test_the_weights_come_back_byte_for_byte(
    form: str, tp: int, pp: int, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, middle, second = (tmp_path / name for name in ("first", "megatron", "second"))
    first.mkdir()
    write_folder(first, source_of({name: weight.to(dtype) for name, weight in truth(OTHER).items()}, OTHER))
    there = ("--checkpoint", first, "--output", middle, "--format", form, "--tp", tp, "--pp", pp)
    assert run_main(to_megatron.main, *there) == 0 and (middle / "release").is_dir()
    said = capsys.readouterr().err
    assert said.count("GELU is the erf form") == 1 and "--no-bias-gelu-fusion" in said
    assert run_main(merge_mp.main, "--checkpoint", middle, "--output", second) == 0
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (second / name).read_bytes() == (first / name).read_bytes(), name


def test_a_written_checkpoint_that_computes_something_else_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(source: object, folder: Path, *, tp: int, pp: int) -> None:
        """Writes weights whose first two norms are exchanged."""
        weights = truth()
        one, two = "h.0.ln_1.weight", "h.0.ln_2.weight"
        write_v3(source_of(weights | {one: weights[two], two: weights[one]}), folder, tp=tp, pp=pp)

    monkeypatch.setattr("convert.targets.megatron.write_v3", wrong)
    arguments = ("--checkpoint", run, "--output", tmp_path / "out", "--tp", 2, "--format", "v3")
    assert run_main(to_megatron.main, *arguments) == 1
    assert "the attention of layer 0" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("main", "flags", "file"),
    [
        (merge_mp.main, (), "model.safetensors"),
        (to_megatron.main, ("--format", "v3", "--tp", 1), "mp_rank_00/model_optim_rng.pt"),
        (to_megatron.main, ("--format", "torch_dist", "--tp", 1), "__0_0.distcp"),
    ],
)
def test_a_full_disk_names_the_file_and_leaves_nothing(
    main: Callable[..., int], flags: tuple[object, ...], file: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert file in refusal(capsys, main, "--checkpoint", run, "--output", run.parent / "out", *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(run.parent) == ["run"]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_command_writes_a_new_run_and_never_replaces_a_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    arguments = ("--checkpoint", run, "--output", output, "--format", "v3")
    assert "--tp 3" in refusal(capsys, to_megatron.main, *arguments, "--tp", 3) and os.listdir(tmp_path) == ["run"]
    assert run_main(to_megatron.main, *arguments, "--tp", 4, "--pp", 2) == 0
    assert "(v3), tensor 4 x pipeline 2, " in capsys.readouterr().out
    assert_equal(merged(open_source(output)), truth())
    before = files_of(output)
    ranks = {f"iter_0000100/mp_rank_{rank:02}_{stage:03}/model_optim_rng.pt" for rank in range(4) for stage in (0, 1)}
    assert before.keys() == {*ranks, "latest_checkpointed_iteration.txt", "run.json"}
    assert f"{output}: " in refusal(capsys, to_megatron.main, *arguments, "--tp", 2) and files_of(output) == before
