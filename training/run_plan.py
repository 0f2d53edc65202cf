"""What a run will do: its settings and data, checked and printed before it starts."""

from dataclasses import dataclass

from common.errors import ConfigError
from common.settings import Experiment, Settings, TokenizeSettings
from common.tables import text_table
from training.dataset.splits import Splits, open_splits
from training.huggingface.finetune import check_finetune
from training.logits_memory import CHUNKS, peak_bytes
from training.model_folder import checkpoint_folders
from training.parallel.stages import bubble_share, stage_layers
from training.parallel.vocabulary import with_padded_vocabulary


@dataclass(frozen=True)
class Plan:
    """A model's settings, its data, and how the data were tokenized."""

    name: str
    experiment: Experiment
    tokenize: TokenizeSettings
    data: Splits
    start_note: str = ""
    """A remark on the weights that training starts from."""

    def __str__(self) -> str:
        experiment, model, train = self.experiment, self.experiment.model, self.experiment.train
        padded = with_padded_vocabulary(model, experiment.parallel.tensor)
        samples = train.iterations * train.global_batch_size
        rows = {
            "model": f"{self.name}: {model.n_layer} layers, {model.n_embd} wide, {model.n_head} heads, "
            f"sequence {model.seq_len}",
            "parameters": f"{model.parameters:,} (vocabulary {model.vocab_size:,}; "
            f"{padded.parameters:,} padded to {padded.vocab_size:,})",
            "start": f"weights of {experiment.finetune}{f'; {self.start_note}' * bool(self.start_note)}"
            if experiment.finetune
            else f"random weights, seed {train.seed}",
            "layout": experiment.parallel.factors + self._layout_notes(),
            "batch": f"{train.micro_batch_size} micro x {experiment.accumulation} accumulation "
            f"x {experiment.parallel.data} data = {train.global_batch_size} samples "
            f"= {train.global_batch_size * model.seq_len:,} tokens",
            "loss": self._loss_note(padded.vocab_size),
            "run": f"{train.iterations:,} iterations, {samples:,} samples, {samples * model.seq_len:,} tokens",
        }
        return f"{text_table(rows.items())}\n\n{self._data_table(samples)}"

    def _loss_note(self, rows: int) -> str:
        """How the loss is computed, and the memory that each form takes at its peak."""
        model, train, ranks = self.experiment.model, self.experiment.train, self.experiment.parallel.tensor
        element = 4 if train.precision == "float32" else 2  # auto is bfloat16 where there is a GPU to fill
        tokens = train.micro_batch_size * model.seq_len
        sizes = [
            peak_bytes(tokens, model.n_embd, rows // ranks, element, chunks, compiled=train.compile != "none") / 2**20
            for chunks in (1, CHUNKS)
        ]
        whole, chunked = (f"{size:,.{0 if size >= 10 else 2}f} MiB" for size in sizes)
        return f"{train.loss}; at its peak {whole} if whole, {chunked} if chunked"

    def _layout_notes(self) -> str:
        """Sequence parallelism, ZeRO, pipeline and recompute, if they are used."""
        experiment, parallel = self.experiment, self.experiment.parallel
        notes = []
        if parallel.tensor > 1 and parallel.sequence_parallel:
            notes.append("sequence parallel")
        if parallel.data > 1:
            same = " (as ZeRO 1: a pipeline scatters gradients once per step)"
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

    def _data_table(self, samples: int) -> str:
        """One line for each split of each corpus; `samples` are those of the whole run."""
        table: list[tuple[str, ...]] = [
            ("data", "part", "share", "documents", "tokens", "samples", "of the run", "epochs")
        ]
        for part, blend in self.data._asdict().items():
            for corpus, split in enumerate(blend.parts if blend else ()):
                share = f"{blend.weights[corpus] / blend.period:.1%}"
                sizes = (f"{size:,}" for size in (split.documents, split.tokens, split.per_epoch))
                taken = blend.taken(samples, corpus)
                use = (f"{taken:,}", f"{taken / split.per_epoch:.2f}") if part == "train" else ("", "")
                table.append((str(split.corpus.prefix), part, share, *sizes, *use))
        lines = text_table(table, "ll" + "r" * 6)
        if self.data.test is None:
            lines += f"\nno test part: train.split {self.experiment.train.split} leaves no sample"
        return lines


def make_plan(settings: Settings, name: str) -> Plan:
    """Open the corpora of the model `name` and check that they, and the weights it starts from, fit its settings.

    Raises InputError or ConfigError. Skips the check of the weights if a checkpoint exists, even a damaged one.
    """
    try:
        experiment, datasets = settings.experiment(name), settings.datasets(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    data = open_splits(datasets, experiment, name)
    start_note = ""
    if experiment.finetune is not None and not checkpoint_folders(settings.model_folder(name)):
        start_note = check_finetune(experiment.model, name, experiment.finetune)
    return Plan(name, experiment, settings.tokenize, data, start_note)
