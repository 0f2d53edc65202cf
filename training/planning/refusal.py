"""One line on what does not fit: the largest term, and what would fit."""

from training.planning.machines import GIB, Machine
from training.planning.search import Prediction, Question, fewest_gpus, nearest, smallest
from training.planning.table import short
from training.planning.workload import Workload


def nothing_fits(workload: Workload, machine: Machine, question: Question) -> str:
    """Why `search` found nothing."""
    gpus, batch = question.gpus, question.global_batch_size
    least = smallest(workload, machine, question)
    if least is None:
        micro = f" in micro-batches of {question.micro_batch_size}" if question.micro_batch_size else ""
        return (
            f"no layout of {gpus} GPUs takes {'at most ' * question.at_most}{batch} samples per step{micro}; "
            f"give another number of GPUs, or --max-global-batch-size {batch}"
        )
    needed = fewest_gpus(workload, machine, question)
    cure = f"{needed} GPUs are the fewest on which a layout fits" if needed else "more GPUs would not help"
    return f"nothing fits on {gpus} x {machine.name}: even {short(least.layout)} takes {_taken(least)}; {cure}"


def does_not_fit(given: Prediction, question: Question) -> str:
    """Why a layout does not fit, and the nearest one that does."""
    problem = f"the layout {short(given.layout)} does not fit: it takes {_taken(given)}"
    near = nearest(given, question)
    if near is None:
        return f"{problem}; {nothing_fits(given.workload, given.machine, question)}"
    return f"{problem}; {changed_keys(given, near)} would fit ({near.memory_bytes / GIB:.1f} GiB)"


def changed_keys(given: Prediction, near: Prediction) -> str:
    """The keys in which a layout differs from another, as a command line takes them: `parallel.zero_stage=1 …`."""
    before, after = given.layout._asdict(), near.layout._asdict()
    sections = dict.fromkeys(("micro_batch_size", "accumulation", "recompute"), "train")
    return " ".join(
        f"{sections.get(key, 'parallel')}.{key}={str(value).lower()}"
        for key, value in after.items()
        if value != before[key]
    )


def _taken(prediction: Prediction) -> str:
    """`91.2 of 79.2 GiB per GPU (the largest term: float32 parameters, 40.1 GiB)`."""
    largest = max(prediction.memory, key=lambda term: term.value)
    return (
        f"{prediction.memory_bytes / GIB:.1f} of {prediction.machine.memory / GIB:.1f} GiB per GPU "
        f"(the largest term: {largest.name}, {largest.value / GIB:.1f} GiB)"
    )
