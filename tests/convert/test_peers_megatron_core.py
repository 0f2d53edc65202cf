"""megatron-core's own model on CPU: its torch_dist is read as it is, and what we write is what it loads.

Needs `pip install --no-deps megatron-core`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from convert.assemble import HUGGING_FACE, assemble
from convert.files.stored import LoadedTensor
from convert.sources.names import parse
from convert.sources.options import Options
from convert.sources.source import QKV, Source, whole
from convert.sources.torch_dist import open_folder
from convert.targets.torch_dist import write
from tests.convert.encoded import SMALL, assert_equal, truth

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.core") is None, reason="megatron-core is not installed"
)


def run_megatron(folder: Path, tp: int, pp: int, steps: Sequence[str]) -> Path:
    """All ranks of tests/convert/megatron_core_worker.py; it loads our `truth`. Returns `folder`."""
    tensors = {name: whole(LoadedTensor(tensor)) for name, tensor in truth().items()}
    (folder / "ours").mkdir()
    write(Source(folder, "memory", SMALL, QKV(3), tensors, (), iteration=5), folder / "ours", tp=tp, pp=pp)
    job = {
        "tp": tp,
        "pp": pp,
        "rows": 384 if tp == 1 else 512,
        "sizes": {key: getattr(SMALL, key) for key in ("n_layer", "n_head", "n_embd", "n_positions", "n_inner")},
        "steps": steps,
        "ours": str(folder / "ours/iter_0000005"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    script = ROOT / "tests/convert/megatron_core_worker.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, str(rank), str(tp * pp), folder],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(tp * pp)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * (tp * pp), "\n".join(said)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_megatron(tmp_path_factory.mktemp("alone"), 1, 1, ["forms", "logits", "load"])


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_megatron(tmp_path_factory.mktemp("split"), 2, 2, ["forms", "load"])


@pytest.fixture(scope="module")
def optimizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_megatron(tmp_path_factory.mktemp("optimizers"), 1, 1, ["optimizers"])


def gathered(folder: Path, name: str, pp: int = 1) -> dict[str, Tensor]:
    """Every tensor of the model that megatron-core gathered itself, by our names."""
    stages = [torch.load(folder / f"{name}_{stage}.pt", weights_only=True) for stage in range(pp)]
    return by_our_names({key: tensor for stage in stages for key, tensor in stage.items()})


def by_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {found.ours(): tensor for key, tensor in tensors.items() if (found := parse(key))}


def check_forms(folder: Path, tp: int, pp: int) -> None:
    expected = gathered(folder, "saved", pp)
    for form in ("stacked", "numbered"):
        source = open_folder(folder / form / "iter_0000007", Options())
        stack = " (stacked)" if form == "stacked" else ""
        assert source.layout == f"Megatron-core torch_dist, 4 layers{stack}, written by tensor {tp} x pipeline {pp}"
        assert (source.model.n_head, source.iteration) == (8, 7)
        assert [note.partition(" ")[0] for note in source.notes] == ["activation"]
        assert_equal({name: assemble(source, name) for name in source.tensors}, expected)
        assert source.step == (1 if form == "stacked" else None)
        for kind, moments in source.moments.items():
            theirs = gathered(folder, kind, pp)
            for name, tensor in moments.items():
                assert torch.equal(assemble(source, name, tensor=tensor), theirs[name]), (kind, name)
        assert set(source.moments) == ({"exp_avg", "exp_avg_sq"} if form == "stacked" else set())


def check_loaded(folder: Path, rows: int, pp: int) -> None:
    loaded = gathered(folder, "loaded", pp)
    assert len(loaded["wte.weight"]) == rows
    assert_equal({**loaded, "wte.weight": loaded["wte.weight"][: SMALL.vocab_size]}, truth())


def test_its_model_on_one_rank_is_read_as_it_is(alone: Path) -> None:
    check_forms(alone, 1, 1)


def test_it_loads_what_we_write(alone: Path) -> None:
    check_loaded(alone, 384, 1)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_its_logits_are_those_of_the_merged_model(alone: Path, activation: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    source = open_folder(alone / "stacked/iter_0000007", Options(activation=activation))
    sizes = source.model
    config = GPT2Config(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.n_positions,
        n_embd=sizes.n_embd,
        n_layer=sizes.n_layer,
        n_head=sizes.n_head,
        n_inner=sizes.n_inner,
        activation_function=sizes.activation,
        layer_norm_epsilon=sizes.layer_norm_epsilon,
    )
    model = GPT2LMHeadModel(config)
    model.train(False)
    weights = {name: assemble(source, name, qkv=HUGGING_FACE, conv1d=True) for name in source.tensors}
    missing = model.transformer.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and not missing.missing_keys
    expected = torch.load(alone / "logits.pt", weights_only=True)
    with torch.no_grad():
        found = model(expected["tokens"]).logits
    scale = expected[activation].abs().max()
    assert (found - expected[activation]).abs().max() < 1e-4 * scale
    other = expected["gelu" if activation == "gelu_new" else "gelu_new"]
    assert (found - other).abs().max() > (found - expected[activation]).abs().max() * 3  # the kinds can be told apart
    assert replace(sizes, activation="gelu_new") == replace(SMALL, vocab_size=384)


@pytest.mark.slow
def test_its_model_on_four_ranks_is_read_as_it_is(split: Path) -> None:
    check_forms(split, 2, 2)


@pytest.mark.slow
def test_four_ranks_load_what_we_write(split: Path) -> None:
    check_loaded(split, 512, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float16", "fully_reshardable"])
def test_masters_of_its_optimizers_are_the_weights(optimizers: Path, kind: str) -> None:
    source = open_folder(optimizers / kind / "iter_0000007", Options())
    kept = torch.load(optimizers / f"{kind}.pt", weights_only=True)
    weights, gradients = by_our_names(kept["weights"]), by_our_names(kept["gradients"])
    assert source.notes == ("weights are the optimizer's float32 masters (52 of 52 tensors)",)
    assert source.step == 1
    for name, weight in weights.items():
        master = assemble(source, name)
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), weight), name
        assert not torch.equal(master, weight.float()), name
        # Adam's first step: 0.1 and 0.001 of the gradient and its square
        found = [assemble(source, name, tensor=source.moments[kind][name]) for kind in ("exp_avg", "exp_avg_sq")]
        torch.testing.assert_close(found[0], 0.1 * gradients[name])
        torch.testing.assert_close(found[1], 0.001 * gradients[name] ** 2)


@pytest.mark.slow
def test_flat_state_of_its_optimizer_is_left(optimizers: Path) -> None:
    source = open_folder(optimizers / "dp_reshardable/iter_0000007", Options())
    weights = by_our_names(torch.load(optimizers / "dp_reshardable.pt", weights_only=True)["weights"])
    assert_equal({name: assemble(source, name) for name in source.tensors}, weights)
    assert source.notes == ("optimizer state that is not stored per parameter (flat buffers) is left",)
    assert source.moments == {} and source.step is None
