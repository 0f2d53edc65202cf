"""The same run on a GPU in every variant: learns what a CPU learns, resumes, is sharded over NCCL, read on a CPU."""

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.files import read_rows
from common.settings import Experiment, GenerateSettings
from tests.training.helpers import BYTE_VOCABULARY, Patch, make_run, settings_of, train_tiny
from training import attention, checkpoint
from training.evaluation.scoring import sum_of_losses
from training.inference.load import model_from_weights
from training.inference.sampling import continue_tokens
from training.kernels import library
from training.parallel import layout
from training.parallel.data_parallel import apply_data_parallel
from training.parallel.pipeline import Stage
from training.parallel.process_group import World
from training.run_plan import make_plan
from training.step import step_batches, train_step
from training.trainer import open_session

# the compiler looks at everything, deprecated things too
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
MODEL = {"n_layer": 2, "n_head": 2, "n_embd": 128, "seq_len": 64, "dropout": 0.0}
NEAR = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs, in whatever test


@pytest.fixture(autouse=True)
def undo_choices() -> Iterator[None]:
    """A run chooses its operations for the whole process."""
    yield
    torch.use_deterministic_algorithms(False)
    attention._enable([True] * len(attention.KERNELS))
    library.select(())
    torch._dynamo.reset()


def run(folder: Path, dropout: float = 0.0, **train: Any) -> list[dict[str, str]]:
    """20 iterations; the rows of train.csv."""
    settings = {"iterations": 20, "save_interval": 10, "lr": 3e-3, **train}
    assert train_tiny(make_run(folder, model={**MODEL, "dropout": dropout}, train=settings)) == 0
    return read_rows(folder / "models/tiny/train.csv")


def losses(rows: list[dict[str, str]]) -> list[float]:
    return [float(row["lm_loss"]) for row in rows]


def weights(folder: Path) -> dict[str, Tensor]:
    """The parameters in the newest checkpoint of a run."""
    return checkpoint.load_weights(checkpoint.resolve(folder / "models/tiny"))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run on a CPU, in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        found = losses(run(tmp_path_factory.mktemp("cpu"), precision="float32", compile="none"))
    assert found[-1] < found[0] - 1
    return found


WAYS: list[dict[str, Any]] = [
    {"precision": precision, "compile": compiled, **more}
    for compiled in ("none", "blocks")
    for precision, more in (
        *((precision, {}) for precision in NEAR),
        *(("float32", {"loss": "chunked"}), ("float32", {"accumulation": 4})),
        *(("float32", {"recompute": recompute}) for recompute in ("selective", "full")),
        *(("bfloat16", {"attention": kernel}) for kernel in attention.KERNELS),
        *((precision, {"kernels": "on"}) for precision in ("float32", "bfloat16")),
    )
]
WAYS += [{"precision": precision, "compile": "model"} for precision in ("float32", "bfloat16")]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_a_gpu_learns_what_a_cpu_learns(tmp_path: Path, way: dict[str, Any], on_cpu: list[float]) -> None:
    if way.get("attention") in ("flash", "cudnn") and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"this GPU has no {way['attention']} attention")
    if "kernels" in way and (missing := library.prepare(report=False)):
        pytest.skip(missing)
    rows = run(tmp_path, initial_loss_scale=2.0**12, async_save=True, **way)
    assert losses(rows) == pytest.approx(on_cpu, rel=NEAR[way["precision"]])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("compiled", ["none", "blocks"])
def test_a_deterministic_run_continues_bit_for_bit(tmp_path: Path, compiled: str, dropout: float) -> None:
    settings = {"precision": "bfloat16", "compile": compiled, "deterministic": True}
    straight = losses(run(tmp_path, dropout, **settings))
    expected = weights(tmp_path)
    (tmp_path / "models/tiny/iter_0000020").rename(tmp_path / "aside")
    assert losses(run(tmp_path, dropout, **settings)) == straight
    found = weights(tmp_path)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_a_checkpoint_of_a_gpu_is_read_on_a_cpu_and_both_generate_the_same_text(tmp_path: Path) -> None:
    run(tmp_path, precision="float32", compile="none", async_save=True)
    manifest = checkpoint.resolve(tmp_path / "models/tiny")
    model = model_from_weights(manifest.experiment.model, checkpoint.load_weights(manifest))
    plan = make_plan(settings_of(tmp_path / "config.yaml"), "tiny")
    count = min(plan.data.valid.per_epoch, 8)
    loss = sum_of_losses(model, plan.data.valid, range(count), 4) / (count * MODEL["seq_len"])
    assert loss == pytest.approx(float(read_rows(tmp_path / "models/tiny/valid.csv")[-1]["loss"]), rel=1e-3)
    prompts, options = [list(b"The list of"), list(b"A")], GenerateSettings(max_tokens=16, temperature=0)
    expected = continue_tokens(model, prompts, options, BYTE_VOCABULARY - 1)
    assert continue_tokens(model.to("cuda"), prompts, options, BYTE_VOCABULARY - 1) == expected


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one process, whose collective calls go through NCCL."""
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield init_device_mesh("cuda", (1, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    dist.destroy_process_group()


def first_losses(experiment: Experiment, plan: Any, mesh: DeviceMesh | None = None) -> list[float]:
    """Of three steps."""
    session = open_session(experiment, World(0, 1, torch.device("cuda", 0)), mesh)
    with closing(step_batches(session, plan.data.train, 0)) as batches:
        steps = islice(enumerate(batches, 1), 3)
        return [train_step(session, number, batch, 3e-3).loss for number, batch in steps]


@pytest.mark.parametrize(
    "parallel",
    [None, *({"zero_stage": stage} for stage in range(4)), {"zero_stage": 3, "offload": True}],
    ids=["no ZeRO", "ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "offload"],
)
@pytest.mark.parametrize("compiled", ["none", "blocks"])
def test_nccl_on_one_rank_changes_nothing(
    tmp_path: Path, parallel: dict[str, Any] | None, compiled: str, mesh: DeviceMesh, monkeypatch: Patch
) -> None:
    config = make_run(tmp_path, model=MODEL, train={"precision": "bfloat16", "compile": compiled})
    plan = make_plan(settings_of(config), "tiny")
    alone = first_losses(plan.experiment, plan)
    applied = layout.parallelize

    def parallelize(stage: Stage, mesh: DeviceMesh, experiment: Experiment, device: torch.device) -> None:
        """Data parallelism also for a single rank."""
        applied(stage, mesh, experiment, device)
        blocks = list(stage.model.h.values())
        apply_data_parallel(stage, blocks, mesh["dp"], experiment.parallel, stage.model.dtype)

    experiment = plan.experiment
    if parallel is not None:
        monkeypatch.setattr(layout, "parallelize", parallelize)
        changed = experiment.parallel.model_copy(update=parallel)  # unchecked: offload asks for two ranks
        experiment = experiment.model_copy(update={"parallel": changed})
    assert first_losses(experiment, plan, mesh) == pytest.approx(alone, rel=1e-2)
