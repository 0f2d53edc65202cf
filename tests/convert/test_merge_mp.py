"""A tensor-parallel run becomes one folder that transformers loads with equal logits, or nothing at all."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from common.errors import CheckpointError, InputError
from convert.merge_mp import main, merge, new_folder
from convert.proof import prove, reference_logits
from tests.conftest import Command
from tests.training.helpers import launch_ok, make_run, run_main
from training import checkpoint, hf
from training.load import load_model, model_from


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a model trained for 4 iterations over two tensor-parallel processes."""
    folder = tmp_path_factory.mktemp("run")
    config = make_run(folder, parallel={"tensor": 2}, train={"save_interval": 2})
    launch_ok(2, "training.train", "--config", config, "--model", "tiny")
    return folder / "models" / "tiny"


def test_transformers_loads_the_merged_folder_with_equal_logits(run: Path, tmp_path: Path, command: Command) -> None:
    output = tmp_path / "merged"
    result = command("convert.merge_mp", "--checkpoint", run, "--output", output)
    assert (result.returncode, result.stderr) == (0, "")
    assert "merged from" in result.stdout and "data 1 x tensor 2, iteration 4" in result.stdout
    theirs = GPT2LMHeadModel.from_pretrained(output).eval()
    assert theirs.config.vocab_size == 257  # the true vocabulary: no padding row is exported
    ours, _ = load_model(run)
    tokens = torch.randint(257, (3, 16), generator=torch.Generator().manual_seed(9))
    expected = ours(tokens).cpu()
    assert (theirs(tokens).logits - expected).abs().max() <= 1e-4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_an_iteration_can_be_named_and_an_older_result_is_replaced(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "merged"
    assert "iteration 2" in merge(run / "iter_0000002", output)
    first = (output / "model.safetensors").read_bytes()
    assert "iteration 4" in merge(run, output)
    assert (output / "model.safetensors").read_bytes() != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_a_conversion_that_mixes_heads_is_not_proved(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Wrong in both directions alike: writing and reading agree with each other, only the proof can tell.
    monkeypatch.setattr(hf, "_swap_heads", lambda tensor, outer, inner: tensor)
    with pytest.raises(CheckpointError, match="logits differ from the checkpoint's"):
        merge(run, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_the_reference_is_the_function_that_transformers_computes(run: Path, tmp_path: Path) -> None:
    merge(run, tmp_path / "merged")
    tokens = torch.arange(32).view(2, 16)
    expected = GPT2LMHeadModel.from_pretrained(tmp_path / "merged").eval()(tokens).logits
    assert (reference_logits(tmp_path / "merged", tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_nan_is_no_proof(run: Path, tmp_path: Path) -> None:
    merge(run, tmp_path / "merged")
    manifest = checkpoint.at(run)
    weights = checkpoint.read_weights(manifest)
    weights["wte.weight"][3] = torch.nan
    with pytest.raises(CheckpointError, match="differ"):
        prove(tmp_path / "merged", model_from(manifest.run.model, weights))


def test_a_folder_that_is_no_model_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with (
        pytest.raises(InputError, match="is no model folder; choose another --output"),
        new_folder(tmp_path / "thesis"),
    ):
        pass
    assert (tmp_path / "thesis" / "chapter1.tex").exists()


def test_an_interrupted_write_leaves_the_older_result(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    for content in ("old", "new"):
        with pytest.raises(KeyboardInterrupt) if content == "new" else open("/dev/null"):
            with new_folder(target) as temporary:
                (temporary / "config.json").write_text(content)
                if content == "new":
                    raise KeyboardInterrupt
    assert (target / "config.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("absent", "no such folder"),
        ("iter_0000009", "not a complete checkpoint"),
        ("megatron", "a Megatron checkpoint (mp_rank_*); these are not read yet"),
        ("empty", "no checkpoint here"),
    ],
)
def test_what_cannot_be_merged_stops_in_one_line(
    tmp_path: Path, folder: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "iter_0000009").mkdir()
    (tmp_path / "megatron" / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    assert run_main(main, "--checkpoint", tmp_path / folder, "--output", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
