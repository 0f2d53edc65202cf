"""What a run is going to do, checked and printed before it does it."""

from dataclasses import dataclass

from common.errors import ConfigError
from common.settings import ModelRun, Settings, TokenizeSettings
from training.data import Corpus, Samples, split_documents


@dataclass(frozen=True)
class Plan:
    """A model's settings, the data they will be trained and validated on, and how its tokens were made."""

    name: str
    run: ModelRun
    tokenize: TokenizeSettings
    train: Samples
    valid: Samples

    def __str__(self) -> str:
        from training.model import padded_vocab_size, parameter_count  # torch: only once the plan is sound

        run, train = self.run, self.run.train
        padded = padded_vocab_size(run.model.vocab_size, run.parallel.tensor)
        steps = train.global_batch_size // (train.micro_batch_size * run.parallel.data)
        samples = train.iterations * train.global_batch_size
        rows = {
            "model": f"{self.name}: {run.model.n_layer} layers, {run.model.n_embd} wide, {run.model.n_head} heads, "
            f"sequence {run.model.seq_len}",
            "parameters": f"{parameter_count(run.model):,} (vocabulary {run.model.vocab_size:,}; "
            f"{parameter_count(run.model, padded):,} padded to {padded:,})",
            "layout": f"data {run.parallel.data} x tensor {run.parallel.tensor} = {run.world_size} processes",
            "batch": f"{train.micro_batch_size} micro x {steps} accumulation x {run.parallel.data} data = "
            f"{train.global_batch_size} samples = {train.global_batch_size * run.model.seq_len:,} tokens",
            "training": f"{self.train.documents:,} documents, {self.train.tokens:,} tokens, "
            f"{self.train.per_epoch:,} samples an epoch",
            "validation": f"{self.valid.documents:,} documents, {self.valid.tokens:,} tokens, "
            f"{self.valid.per_epoch:,} samples",
            "run": f"{train.iterations:,} iterations, {samples:,} samples, {samples / self.train.per_epoch:.2f} epochs",
        }
        return "\n".join(f"{key:<12}{value}" for key, value in rows.items())


def make_plan(settings: Settings, name: str) -> Plan:
    """Open the corpus and check it against the model `name`.

    Raises InputError or ConfigError when the corpus is absent, too small for one sample, made with another
    vocabulary, or split so that nothing is left to train on.
    """
    try:
        run = settings.model_run(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    corpus = Corpus.open(settings.dataset_prefix)
    corpus.check_vocabulary(run.model.vocab_size, f"models.{name}.model.vocab_size")
    parts = split_documents(run.train.split, corpus.documents)
    train = Samples(corpus, parts["train"], run.model.seq_len, run.train.seed)
    valid = Samples(corpus, parts["valid"], run.model.seq_len)
    train.require_one("train")
    if parts["valid"]:
        valid.require_one("valid")
    return Plan(name, run, settings.tokenize, train, valid)
