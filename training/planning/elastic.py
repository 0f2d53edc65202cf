"""The layout of a training that starts on fewer nodes than it asks for (`cluster.min_nodes`).

Tensor and pipeline parallelism stay. The data-parallel ranks follow the number of processes, and
accumulation follows them, so that the global batch and the schedule stay.
"""

from common.settings import Experiment, Settings
from training.planning.fit import predict
from training.planning.layout import Layout
from training.planning.machines import Machine


def on_processes(experiment: Experiment, processes: int, machine: Machine | None = None) -> Experiment | None:
    """The experiment over so many processes; None if its global batch does not divide over them.

    The micro-batch stays, unless ZeRO's larger shards leave no memory for it on `machine`: then it
    becomes its largest divisor that fits.
    """
    layout, batch = Layout.of(experiment), experiment.train.global_batch_size
    data, rest = divmod(processes, layout.tensor * layout.pipeline)
    if rest or not data or batch % (layout.micro_batch_size * data):
        return None
    same = _with(experiment, layout, data, layout.micro_batch_size)
    if same is None or machine is None or predict(same, machine).fits:
        return same
    smaller = (size for size in range(layout.micro_batch_size - 1, 0, -1) if layout.micro_batch_size % size == 0)
    candidates = (_with(experiment, layout, data, size) for size in smaller)
    return next((one for one in candidates if one is not None and predict(one, machine).fits), same)


def of_this_start(settings: Settings, name: str, processes: int, machine: Machine | None = None) -> Settings:
    """The settings of a start with so many processes: those of model `name` may be fewer than asked."""
    experiment = settings.models.get(name)
    if experiment is None or experiment.parallel.auto or not settings.cluster.min_nodes:
        return settings
    adapted = on_processes(experiment, processes, machine) or experiment
    return settings.model_copy(update={"models": {**settings.models, name: adapted}})


def _with(experiment: Experiment, layout: Layout, data: int, micro_batch: int) -> Experiment | None:
    """None if the pipeline's schedule cannot run the micro-batches of a step."""
    accumulation = experiment.train.global_batch_size // (micro_batch * data)
    try:
        return layout._replace(data=data, micro_batch_size=micro_batch, accumulation=accumulation).apply(experiment)
    except ValueError:
        return None
