"""Files for Megatron-LM are those that it writes itself, and come back bit by bit."""

import errno
import json
import resource
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.errors import CheckpointError
from convert import to_megatron
from convert.assemble import assemble
from convert.files.stored import LoadedTensor
from convert.sources.megatron import open_folder
from convert.sources.options import Options
from convert.sources.source import QKV, Architecture, Source, whole
from convert.targets import megatron
from convert.targets.megatron import write_2019, write_v3
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.megatron_files import Layout, content_of, folder_name, write
from tests.training.helpers import run_main

WRITERS: dict[str, Callable[..., None]] = {"2019": write_2019, "core": write_v3}


def source_of(
    weights: Mapping[str, Tensor], model: Architecture = SMALL, hugging_face: bool = False, **changes: Any
) -> Source:
    """A model in memory, in our layout or in Hugging Face's."""
    tensors = dict(weights)
    if hugging_face:
        for name, tensor in weights.items():
            if ".attn.c_attn." in name:
                tensor = tensor.view(model.n_head, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
            if name.startswith("h.") and tensor.dim() == 2:
                tensor = tensor.t()
            tensors[name] = tensor
    source = Source(
        path=Path("memory"),
        layout="in memory",
        model=model,
        qkv=QKV(0 if hugging_face else 3),
        tensors={name: whole(LoadedTensor(tensor)) for name, tensor in tensors.items()},
        files=(),
        conv1d=hugging_face,
    )
    return replace(source, **changes)


@pytest.mark.parametrize("hugging_face", [False, True])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("names", ["2019", "core"])
def test_a_file_has_what_megatron_writes(
    names: str, tensor: int, pipeline: int, hugging_face: bool, tmp_path: Path
) -> None:
    if names == "2019":
        pipeline = 1
    weights = {name: value.half() for name, value in truth().items()}
    source = source_of(weights, hugging_face=hugging_face, iteration=100, consumed_samples=6400)
    WRITERS[names](source, tmp_path, tp=tensor, pp=pipeline)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "100"
    assert len(list(tmp_path.glob("iter_0000100/mp_rank_*/*"))) == tensor * pipeline
    version = None if names == "2019" else 3.0
    layout = Layout(names, version, tensor, pipeline, dtype=torch.float16, padding="last")
    for stage in range(pipeline):
        for rank in range(tensor):
            path = tmp_path / "iter_0000100" / folder_name(layout, stage, rank) / "model_optim_rng.pt"
            found = torch.load(path, weights_only=False)
            expected = content_of(layout, truth(), stage, rank)
            expected["model"].pop("output_layer._extra_state", None)  # Megatron sets it itself where it is missing
            assert found["iteration"] == 100
            assert found.keys() == expected.keys()
            assert found.get("checkpoint_version") == expected.get("checkpoint_version")
            assert_equal(found["model"], expected["model"])
            assert all(value.dtype == torch.float16 for value in found["model"].values())
            if "args" in expected:
                assert vars(expected["args"]).items() <= (vars(found["args"]) | {"rank": 0}).items()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_again_bit_by_bit(data: st.DataObject) -> None:
    names = data.draw(st.sampled_from(["2019", "core"]))
    tensor = data.draw(st.sampled_from([1, 2, 3, 4]))
    pipeline = 1 if names == "2019" else data.draw(st.integers(1, 3))
    heads = tensor * data.draw(st.integers(1, 2))
    width = heads * data.draw(st.sampled_from([1, 2, 3, 5]))
    inner = 4 * width if names == "2019" else tensor * data.draw(st.integers(1, 7))
    tied = names == "2019" or data.draw(st.booleans())
    model = Architecture(
        n_layer=pipeline * data.draw(st.integers(1, 2)),
        n_head=heads,
        n_embd=width,
        n_positions=data.draw(st.integers(1, 5)),
        n_inner=inner,
        vocab_size=data.draw(st.integers(1, 400)),
        activation="gelu_new" if names == "2019" else data.draw(st.sampled_from(["gelu_new", "gelu"])),
        layer_norm_epsilon=1e-5 if names == "2019" else 1e-6,
        tied=tied,
        dropout=0.1 if names == "2019" else 0.25,
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    iteration = data.draw(st.sampled_from([None, 7]))
    weights = {name: value.to(dtype) for name, value in truth(model).items()}
    source = source_of(weights, model, data.draw(st.booleans()), iteration=iteration)
    with tempfile.TemporaryDirectory() as folder:
        WRITERS[names](source, Path(folder), tp=tensor, pp=pipeline)
        options = Options(num_heads=heads, vocab_size=model.vocab_size) if names == "2019" else Options()
        again = open_folder(Path(folder) / ("iter_0000007" if iteration else "release"), options)
        assert again.model == model
        assert again.iteration == (iteration or 0)
        assert_equal({name: assemble(again, name) for name in again.tensors}, weights, model)
        rows = torch.cat([block.tensor.read() for block in again.tensors["wte.weight"].blocks])
        assert torch.equal(
            rows[model.vocab_size :],
            rows[model.vocab_size - 1 : model.vocab_size].expand(len(rows) - model.vocab_size, -1),
        )


def test_every_megatron_layout_becomes_every_other(tmp_path: Path) -> None:
    for number, (names, version, tensor) in enumerate([("2019", None, 4), ("transformer", 1, 2), ("folded", 3.0, 8)]):
        layout = Layout(names, version, tensor, extras=True)
        options = Options(num_heads=8, vocab_size=300) if names == "2019" else Options()
        source = open_folder(write(tmp_path / f"{number}" / "iter_0000100", layout), options)
        for target, (parts, pipeline) in {"2019": (8, 1), "core": (2, 2)}.items():
            folder = tmp_path / f"{number}-{target}"
            folder.mkdir()
            WRITERS[target](source, folder, tp=parts, pp=pipeline)
            again = open_folder(folder / "iter_0000100", Options(num_heads=8, vocab_size=300))
            assert_equal({name: assemble(again, name) for name in again.tensors}, truth())


REFUSED: list[tuple[str, dict[str, Any], dict[str, int], str]] = [
    ("2019", {}, {"tp": 1, "pp": 2}, "--pp: the 2019 format has no pipeline stages; leave it out"),
    ("2019", {"tied": False}, {"tp": 1, "pp": 1}, "memory: has a head of its own, which the 2019 fork does not"),
    ("2019", {"activation": "gelu"}, {"tp": 1, "pp": 1}, "has the activation gelu, which the 2019 fork does not"),
    ("2019", {"layer_norm_epsilon": 1e-6}, {"tp": 1, "pp": 1}, "has the LayerNorm epsilon 1e-06"),
    ("2019", {"n_inner": 64}, {"tp": 1, "pp": 1}, "has MLPs 64 wide"),
    ("core", {"activation": "relu"}, {"tp": 1, "pp": 1}, "has no activation relu, only GELU"),
    ("core", {}, {"tp": 3, "pp": 1}, "--tp 3 does not divide the 8 heads of memory"),
    ("core", {"n_inner": 6}, {"tp": 4, "pp": 1}, "--tp 4 does not divide the 6 columns of the MLP of memory"),
    ("core", {}, {"tp": 1, "pp": 3}, "--pp 3 does not divide the 4 layers of memory"),
]


@pytest.mark.parametrize(("names", "changes", "sizes", "message"), REFUSED)
def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(
    names: str, changes: dict[str, Any], sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    model = replace(SMALL, **changes)
    with pytest.raises(CheckpointError) as caught:
        WRITERS[names](source_of(truth(model), model), tmp_path, **sizes)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            write_v3(source_of(truth()), tmp_path, tp=1, pp=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert str(caught.value.filename).endswith("mp_rank_00/model_optim_rng.pt")


def test_each_tensor_is_assembled_once_for_all_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def counted(source: Source, name: str, *, qkv: QKV) -> Tensor:
        names.append(name)
        return assemble(source, name, qkv=qkv)

    monkeypatch.setattr(megatron, "assemble", counted)
    write_v3(source_of(truth()), tmp_path, tp=4, pp=2)
    assert sorted(names) == sorted([*truth(), "wte.weight"])  # both end stages have the tied embedding


# the command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Megatron run of two ranks; the command finds its checkpoint."""
    iteration = write(tmp_path / "run" / "iter_0000100", Layout("core", 3.0, 2))
    monkeypatch.setattr("convert.sources.find.open_source", lambda path, options=None: open_folder(iteration, options))
    return tmp_path / "run"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_command_writes_a_run_and_only_force_replaces_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    arguments = ("--checkpoint", run, "--output", output, "--format", "v3")
    assert run_main(to_megatron.main, *arguments, "--tp", 4, "--pp", 2) == 0
    said = capsys.readouterr()
    assert "Megatron-LM (v3), tensor 4 x pipeline 2, 10 files" in said.out and said.err == ""
    again = open_folder(output / "iter_0000100", Options())
    assert_equal({name: assemble(again, name) for name in again.tensors}, truth())
    assert sorted(path.name for path in output.iterdir()) == [
        "converted.json",
        "iter_0000100",
        "latest_checkpointed_iteration.txt",
        "run.json",
    ]
    assert json.loads((output / "run.json").read_text())["inputs"][0]["path"].startswith(str(run))
    before = files_of(output)
    assert run_main(to_megatron.main, *arguments, "--tp", 2) == 2
    assert "exists already; --force replaces it" in capsys.readouterr().err
    assert files_of(output) == before
    assert run_main(to_megatron.main, *arguments, "--tp", 2, "--force") == 0
    assert len(files_of(output)) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_the_2019_format_says_which_flags_read_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_main(to_megatron.main, "--checkpoint", run, "--output", tmp_path / "o", "--format", "2019", "--tp", 2) == 0
    )
    assert "read it with --num-heads 8 --vocab-size 300\n" in capsys.readouterr().err


def test_an_error_leaves_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--checkpoint", run, "--output", tmp_path / "out", "--format", "v3", "--tp", 3)
    assert run_main(to_megatron.main, *arguments) == 2
    error = capsys.readouterr().err
    assert "--tp 3 does not divide the 8 heads" in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def train_on(folder: Path) -> None:
    """What a training leaves that goes on in the folder."""
    (folder / "iter_0000200" / "mp_rank_00").mkdir(parents=True)
    (folder / "iter_0000200" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"trained")


def grow(folder: Path) -> None:
    with (folder / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt").open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    ("spoil", "foreign"),
    [
        (train_on, "iter_0000200/mp_rank_00/model_optim_rng.pt"),
        (grow, "iter_0000100/mp_rank_00/model_optim_rng.pt"),
        (lambda folder: (folder / "notes.txt").write_text("mine"), "notes.txt"),
        (lambda folder: (folder / "converted.json").unlink(), "iter_0000100/mp_rank_00/model_optim_rng.pt"),
        (lambda folder: (folder / "converted.json").write_text("[]"), "converted.json"),
        (lambda folder: (folder / "linked").symlink_to(folder.parent), "linked"),
    ],
)
def test_files_that_the_command_did_not_write_are_never_removed(
    spoil: Callable[[Path], object], foreign: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    arguments = ("--checkpoint", run, "--output", output, "--format", "v3", "--tp", 1)
    assert run_main(to_megatron.main, *arguments) == 0
    spoil(output)
    before = files_of(output)
    capsys.readouterr()
    assert run_main(to_megatron.main, *arguments, "--force") == 2
    assert f"{output / foreign}: not a file that this command wrote" in capsys.readouterr().err
    assert files_of(output) == before


def test_torch_dist_has_its_own_writer(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def write(source: Source, folder: Path, **sizes: int) -> None:
        calls.append(sizes)
        (folder / "file").write_text(json.dumps(sizes))

    module = Namespace(write=write)
    monkeypatch.setattr(to_megatron, "import_module", lambda name: {"convert.targets.torch_dist": module}[name])
    arguments = ("--checkpoint", run, "--output", tmp_path / "out", "--format", "torch_dist", "--tp", 2, "--pp", 2)
    assert run_main(to_megatron.main, *arguments) == 0
    assert calls == [{"tp": 2, "pp": 2}]
