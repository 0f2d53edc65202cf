"""Says when a training reads its text too often.

Up to 4 epochs are nearly as good as new text. After some 16 a repetition is worth less than 1/e of
it, after some 40 nothing: Muennighoff et al. 2023, Scaling Data-Constrained Language Models.
"""

from collections.abc import Sequence

from common.settings import DataSettings, Experiment, TrainSettings
from training.dataset.blend import Blend, open_training_part

_GOOD, _TOO_MANY = 4, 16


def too_many_epochs(train: TrainSettings, name: str, data: Blend, samples: int) -> str:
    """A sentence if the `samples` of a run are over 16 epochs of the training part, or ''.

    Of a blend, the corpus that repeats first counts.
    """
    epochs = samples / data.per_epoch
    if epochs <= _TOO_MANY:
        return ""
    fewer = max(1, _GOOD * data.per_epoch // train.global_batch_size)
    return (
        f"the text is read {epochs:,.0f} times; {_GOOD} times are nearly as good as new text, over {_TOO_MANY} teach "
        f"little more (Muennighoff et al. 2023): set models.{name}.train.iterations to {fewer:,} for {_GOOD}, or use "
        "more text"
    )


def of_datasets(experiment: Experiment, name: str, datasets: Sequence[DataSettings]) -> str:
    """`too_many_epochs` of a whole run, from the indices of its datasets, without their tokens.

    Raises InputError if a dataset is missing, damaged, or smaller than a sample.
    """
    train = experiment.train
    data = open_training_part(datasets, train, experiment.model.seq_len)
    return too_many_epochs(train, name, data, train.iterations * train.global_batch_size)
