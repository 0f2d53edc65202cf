"""The layout of a training that starts on fewer nodes than it asks for (`cluster.min_nodes`).

Tensor and pipeline parallelism stay. The data-parallel ranks follow the number of processes, and
accumulation follows them, so that the global batch and the schedule stay.
"""

from common.errors import ConfigError
from common.settings import ClusterSettings, Experiment, Settings
from training.planning.layout import Layout
from training.planning.machines import Machine, processes_of
from training.planning.search import predict


def process_counts(name: str, experiment: Experiment, cluster: ClusterSettings) -> list[int]:
    """The numbers of processes with which a job of model `name` may start, largest first.

    One number without `cluster.min_nodes`, or if the model needs no more nodes. Raises ConfigError
    if no smaller number is possible.
    """
    most, least = processes_of(experiment, cluster), cluster.min_nodes
    if not least:
        return [most]
    if cluster.executor == "local":
        raise ConfigError(f"cluster.min_nodes {least} needs cluster.executor slurm; set it to 0")
    per_node = cluster.gpus_per_node or cluster.tasks_per_node
    if least * per_node >= most:
        return [most]
    if experiment.parallel.auto:
        raise ConfigError(
            f"cluster.min_nodes {least}: models.{name}.parallel is auto and chosen when the job starts; set "
            "cluster.gpu, so that it is chosen before, or a layout"
        )
    smaller = [count for count in range(most - per_node, 0, -per_node) if _spread(experiment, count)]
    if usable := [count for count in smaller if count >= least * per_node]:
        return [most, *usable]
    cure = f"it divides over {smaller[0] // per_node}" if smaller else "change it, or micro_batch_size"
    raise ConfigError(
        f"cluster.min_nodes {least}: models.{name}.train.global_batch_size {experiment.train.global_batch_size} "
        f"divides over no number of nodes from {least} to {most // per_node - 1} ({per_node} processes each); {cure}"
    )


def describe_counts(counts: list[int]) -> str:
    """`8 processes`, or `4 to 8 processes`."""
    return f"{' to '.join(map(str, dict.fromkeys([counts[-1], counts[0]])))} processes"


def on_processes(settings: Settings, name: str, processes: int, machine: Machine | None = None) -> Settings:
    """The settings of a start with so many processes, perhaps fewer than model `name` asks for.

    The micro-batch stays, unless ZeRO's larger shards leave no memory for it on `machine`: then it
    becomes its largest divisor that fits. Settings over which the batch does not divide stay.
    """
    experiment = settings.models[name]
    if processes == experiment.world_size and (machine is None or predict(experiment, machine).fits):
        return settings
    micro = experiment.train.micro_batch_size
    sizes = [size for size in range(micro, 0, -1) if micro % size == 0]
    layouts = [layout for size in sizes if (layout := _spread(experiment, processes, size))]
    if not layouts or layouts[0].train.micro_batch_size != micro:
        return settings
    fitting = (one for one in layouts if machine is None or predict(one, machine).fits)
    return settings.model_copy(update={"models": {**settings.models, name: next(fitting, layouts[0])}})


def extremes(settings: Settings, name: str, counts: list[int], machine: Machine) -> list[Settings]:
    """The settings as they are, and, if there are several `counts`, those of the smallest start."""
    return [settings, *(on_processes(settings, name, count, machine) for count in counts[1:][-1:])]


def _spread(experiment: Experiment, processes: int, micro_batch: int = 0) -> Experiment | None:
    """The experiment over so many processes; None if that is not possible with its global batch."""
    layout, batch = Layout.of(experiment), experiment.train.global_batch_size
    micro_batch = micro_batch or layout.micro_batch_size
    data, rest = divmod(processes, layout.tensor * layout.pipeline)
    if rest or not data or batch % (micro_batch * data):
        return None
    accumulation = batch // (micro_batch * data)
    try:
        return layout._replace(data=data, micro_batch_size=micro_batch, accumulation=accumulation).apply(experiment)
    except ValueError:  # the pipeline's schedule cannot run so many micro-batches
        return None
