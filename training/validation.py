"""Loss over samples in order, without touching the training order: used while training and by `training.evaluate`."""

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from common.settings import TrainSettings
from training.data import Samples
from training.model import GPT2, next_token_loss
from training.parallel import plain


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The precision of the matrix products; parameters stay float32."""
    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def validation_samples(samples: Samples, train: TrainSettings) -> int:
    """Samples in a validation run: `eval_batches` global batches, or the whole part where it is smaller."""
    return min(samples.per_epoch, train.eval_batches * train.global_batch_size)


@torch.no_grad()
def mean_loss(
    model: GPT2,
    samples: Samples,
    count: int,
    micro_batch_size: int,
    precision: str,
    mesh: DeviceMesh | None = None,
) -> float:
    """Mean loss in nats a token over the first `count` samples (a collective call, equal on all ranks).

    Data-parallel ranks take turns. All run the same number of forward passes; a batch past the end weighs nothing.
    """
    device = next(model.parameters()).device
    data_rank, data_size = (mesh.get_local_rank("dp"), mesh["dp"].size()) if mesh else (0, 1)
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, samples
    was_training = model.training
    model.eval()
    for first in range(0, count, micro_batch_size * data_size):
        begin = first + data_rank * micro_batch_size
        numbers = range(min(begin, count), min(begin + micro_batch_size, count))
        tokens, targets = samples.batch(numbers or range(1))
        with loss_parallel(), autocast(precision, device):
            loss = plain(next_token_loss(model(tokens.to(device)), targets.to(device)))
        total += torch.stack([loss.double() * len(numbers), torch.tensor(len(numbers), device=device)])
    model.train(was_training)
    if mesh is not None:
        dist.all_reduce(total, group=mesh.get_group("dp"))
    return float(total[0] / total[1])
