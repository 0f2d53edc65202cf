"""Loss over samples in order, without touching the training order: used while training and by `training.evaluate`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from common.settings import TrainSettings
from training.batches import Batch, BatchForm, Readable, prefetched, read_batch
from training.blend import Blend
from training.model import GPT2, IGNORED, summed_loss
from training.parallel import plain


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The precision of the matrix products; parameters stay float32."""
    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def validation_samples(samples: Blend, train: TrainSettings) -> int:
    """Samples in a validation run: `eval_batches` global batches, or the whole part where it is smaller."""
    return min(samples.per_epoch, train.eval_batches * train.global_batch_size)


@torch.no_grad()
def mean_loss(
    model: GPT2,
    samples: Readable,
    count: int,
    micro_batch_size: int,
    precision: str,
    form: BatchForm,
    mesh: DeviceMesh | None = None,
) -> float:
    """Mean loss in nats a token over the first `count` samples (a collective call, equal on all ranks).

    Data-parallel ranks take turns. All run the same number of forward passes; a batch past the end weighs nothing.
    """
    device = next(model.parameters()).device
    data_rank, data_size = (mesh.get_local_rank("dp"), mesh["dp"].size()) if mesh else (0, 1)

    def numbers() -> Iterator[range]:
        for first in range(
            data_rank * micro_batch_size, count + data_rank * micro_batch_size, micro_batch_size * data_size
        ):
            yield range(min(first, count), min(first + micro_batch_size, count))

    def read(wanted: range) -> Batch:
        batch = read_batch(samples, form, wanted or range(1))
        return batch if wanted else batch._replace(targets=batch.targets.fill_(IGNORED), counted=0)

    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, targets
    was_training = model.training
    model.eval()
    with closing(prefetched(read, numbers(), threads=1, ahead=4)) as batches:
        for batch in (batch.to(device) for batch in batches):
            with loss_parallel(), autocast(precision, device):
                loss = plain(summed_loss(model(batch.tokens, batch.positions), batch.targets))
            total += torch.stack([loss.double(), torch.tensor(batch.counted, device=device)])
    model.train(was_training)
    if mesh is not None:
        dist.all_reduce(total, group=mesh.get_group("dp"))
    return float(total[0] / total[1])
