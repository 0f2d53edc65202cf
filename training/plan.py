"""What a run is going to do, checked and printed before it does it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError, InputError
from common.settings import Experiment, Settings, TokenizeSettings
from training.dataset.blend import Blend
from training.dataset.corpus import PARTS, Corpus, Samples, split_documents
from training.huggingface.finetune import check_finetune
from training.model_folder import checkpoint_folders

if TYPE_CHECKING:
    from training.dataset.batches import BatchForm


@dataclass(frozen=True)
class Plan:
    """A model's settings, the data it will be trained, validated and tested on, and how its tokens were made."""

    name: str
    experiment: Experiment
    tokenize: TokenizeSettings
    train: Blend
    valid: Blend
    test: Blend | None
    """None where a corpus has not even one sample of it."""
    start: str = ""
    """What there is to say of the weights that it starts from."""

    @property
    def form(self) -> "BatchForm":
        """How batches are made of samples."""
        from training.dataset.batches import BatchForm  # torch

        return BatchForm(
            self.train.end_of_text, self.experiment.train.reset_position_ids, self.experiment.train.eod_mask_loss
        )

    def __str__(self) -> str:
        from training.model import padded_vocab_size, parameter_count  # torch: only once the plan is sound

        experiment, model, train = self.experiment, self.experiment.model, self.experiment.train
        padded = padded_vocab_size(experiment.model.vocab_size, experiment.parallel.tensor)
        samples = train.iterations * train.global_batch_size
        rows = {
            "model": f"{self.name}: {model.n_layer} layers, {model.n_embd} wide, {model.n_head} heads, "
            f"sequence {model.seq_len}",
            "parameters": f"{parameter_count(model):,} (vocabulary {model.vocab_size:,}; "
            f"{parameter_count(model, padded):,} padded to {padded:,})",
            "start": f"weights of {experiment.finetune}{f'; {self.start}' * bool(self.start)}"
            if experiment.finetune
            else f"random weights, seed {train.seed}",
            "layout": experiment.parallel.factors + self._layout_notes(),
            "batch": f"{train.micro_batch_size} micro x {experiment.accumulation} accumulation "
            f"x {experiment.parallel.data} data = {train.global_batch_size} samples "
            f"= {train.global_batch_size * model.seq_len:,} tokens",
            "run": f"{train.iterations:,} iterations, {samples:,} samples, {samples * model.seq_len:,} tokens",
        }
        return "\n".join([*(f"{key:<12}{value}" for key, value in rows.items()), "", *self._data_table(samples)])

    def _layout_notes(self) -> str:
        """What else there is to say of the layout."""
        from training.parallel.pipeline import bubble_share, stage_layers

        experiment, parallel = self.experiment, self.experiment.parallel
        notes = []
        if parallel.tensor > 1 and parallel.sequence_parallel:
            notes.append("sequence parallel")
        if parallel.data > 1:
            same = " (as ZeRO 1: a pipeline scatters gradients once a step)"
            notes.append(
                f"ZeRO {parallel.zero_stage}{same if parallel.zero_stage == 2 and parallel.pipeline > 1 else ''}"
            )
        if parallel.pipeline > 1:
            layers = stage_layers(experiment.model.n_layer, parallel.pipeline * parallel.virtual_stages)
            idle = bubble_share(parallel.pipeline, parallel.virtual_stages, experiment.accumulation)
            each = "+".join(str(len(stage)) for stage in layers)
            notes.append(f"{parallel.schedule}, {each} layers, idle {idle:.1%} of the time")
        if experiment.train.recompute != "none":
            notes.append(f"{experiment.train.recompute} recompute")
        return "".join(f"; {note}" for note in notes)

    def _data_table(self, samples: int) -> list[str]:
        """A line for each part of each corpus, columns aligned."""
        table: list[tuple[str, ...]] = [
            ("data", "part", "share", "documents", "tokens", "samples", "of the run", "epochs")
        ]
        parts = {"train": self.train, "valid": self.valid} | ({"test": self.test} if self.test else {})
        for name, blend in parts.items():
            for corpus, part in enumerate(blend.parts):
                share = f"{blend.weights[corpus] / blend.period:.1%}"
                row = (
                    str(part.corpus.prefix),
                    name,
                    share,
                    *map(_thousands, (part.documents, part.tokens, part.per_epoch)),
                )
                taken = blend.taken(samples, corpus)
                columns = (_thousands(taken), f"{taken / part.per_epoch:.2f}") if name == "train" else ("", "")
                table.append((*row, *columns))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(f"{cell:{'<' if place < 2 else '>'}{widths[place]}}" for place, cell in enumerate(row)).rstrip()
            for row in table
        ]
        return (
            lines
            if self.test
            else [*lines, f"no test part: train.split {self.experiment.train.split} leaves no sample"]
        )


def _thousands(number: int) -> str:
    return f"{number:,}"


def make_plan(settings: Settings, name: str) -> Plan:
    """Open the corpora and check them against the model `name`.

    Raises InputError or ConfigError when a corpus is absent, made with another vocabulary, or split so that a part gets
    no document, or training and validation not one sample. A test part may be smaller: it is for the record alone.
    A run without a checkpoint yet must fit the model that it starts from, too.
    """
    try:
        experiment, datasets = settings.experiment(name), settings.datasets(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    parts: dict[str, list[Samples]] = {part: [] for part in PARTS}
    ends: dict[int, Path] = {}
    for source in datasets:
        corpus = Corpus.open(source.prefix)
        corpus.check_vocabulary(experiment.model.vocab_size, f"models.{name}.model.vocab_size")
        for key in ("reset_position_ids", "eod_mask_loss"):
            if getattr(experiment.train, key):
                corpus.check_end_of_text(f"models.{name}.train.{key}")
        ends.setdefault(corpus.end_of_text, source.prefix)
        for part, documents in split_documents(experiment.train.split, corpus.documents, source.prefix).items():
            samples = Samples(
                corpus, documents, experiment.model.seq_len, experiment.train.seed if part == "train" else None
            )
            if documents and part != "test":
                samples.require_one(part)
            parts[part].append(samples)
    start = ""
    if experiment.finetune is not None and not checkpoint_folders(settings.model_folder(name)):
        start = check_finetune(experiment.model, name, experiment.finetune)
    if len(ends) > 1:
        closing = " and ".join(f"{prefix} with token {end}" for end, prefix in ends.items())
        raise InputError(f"{closing} close their documents: one model needs one vocabulary")
    weights = [source.weight for source in datasets]
    train, valid, test = (Blend(parts[part], weights) for part in PARTS)
    return Plan(name, experiment, settings.tokenize, train, valid, test if test.per_epoch else None, start)
