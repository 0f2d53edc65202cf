"""The plan of a run: its settings and data, checked and printed before the run starts."""

import fnmatch
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from common.console import text_table
from common.errors import ConfigError
from common.settings import ClusterSettings, Experiment, Settings, TokenizeSettings
from common.settings.training import DOCUMENT_RULES
from common.tokenizer import Tokenizer
from common.vocabulary import vocabulary_files
from training.dataset.blend import MAX_PERIOD, Splits, open_splits
from training.dataset.epochs import too_many_epochs
from training.huggingface.config import check_finetune
from training.launch.device import threads_of
from training.model_folder import checkpoint_folders, newest_iteration
from training.parallel.collectives import run_on_rank0
from training.parallel.sizes import bubble_share, stage_layers, with_padded_vocabulary
from training.planning.elastic import on_processes
from training.planning.fit import check_fits, gib, resolve
from training.planning.layout import by_part
from training.planning.machines import Machine, this_cpu, this_gpu
from training.planning.search import Prediction, predict
from training.planning.speed import within_documents
from training.tensors import all_names

if TYPE_CHECKING:
    from training.launch.process_group import World


def tokenizer_of(tokenize: TokenizeSettings) -> Tokenizer:
    """A run's tokenizer. Raises InputError if a file is missing."""
    return Tokenizer(vocabulary_files(tokenize.encoder_json, tokenize.vocab_bpe))


@dataclass(frozen=True)
class Plan:
    """A model's settings, its data, and how the data were tokenized."""

    name: str
    experiment: Experiment
    tokenize: TokenizeSettings
    data: Splits
    machine: Machine | None = None
    """The job's machine; None until it is known. With it, the plan has predictions."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run, read when it is first used."""
        return tokenizer_of(self.tokenize)

    @cached_property
    def attention(self) -> float:
        """Tokens that a token attends to, as a share of those in a sample."""
        if not self.experiment.train.reset_attention_mask:
            return 1.0
        samples, weights = self.data.train.parts, self.data.train.weights
        lengths = (each.corpus.lengths[each.part.start : each.part.stop] for each in samples)
        shares = [within_documents(each, self.experiment.model.seq_len) for each in lengths]
        return float(np.average(shares, weights=weights))

    @cached_property
    def prediction(self) -> Prediction | None:
        """Memory and time on the job's machine; None until it is known."""
        return None if self.machine is None else predict(self.experiment, self.machine, self.attention)

    @property
    def seconds(self) -> float | None:
        """The predicted duration of the whole run; None if unknown."""
        if self.prediction is None or not self.prediction.machine.timed:
            return None
        return self.experiment.train.iterations * self.prediction.step_seconds

    def text(self, done: int = 0, consumed_samples: int = 0) -> str:
        """The plan as tables, of a run that starts or that resumes after `done` iterations."""
        experiment, model, train = self.experiment, self.experiment.model, self.experiment.train
        padded = with_padded_vocabulary(model, experiment.parallel.tensor)
        left = train.iterations - done
        samples = consumed_samples + left * train.global_batch_size
        start = f"random weights, seed {train.seed}"
        if done:
            start = f"checkpoint of iteration {done:,}, {consumed_samples:,} samples consumed"
        elif experiment.finetune:
            start = f"weights of {experiment.finetune}"
        rows = {
            "model": f"{self.name}: {model.n_layer} layers, {model.n_embd} wide, {model.n_head} heads, "
            f"sequence {model.seq_len}",
            "parameters": f"{model.parameters:,} (vocabulary {model.vocab_size:,}; "
            f"{padded.parameters:,} padded to {padded.vocab_size:,})",
            "start": start,
            "layout": self.layout,
            "batch": f"{train.micro_batch_size} micro x {experiment.accumulation} accumulation "
            f"x {experiment.parallel.data} data = {train.global_batch_size} samples "
            f"= {train.global_batch_size * model.seq_len:,} tokens",
            "run": f"{train.iterations:,} iterations{f', {left:,} left' * bool(done)}, {samples:,} samples, "
            f"{samples * model.seq_len:,} tokens",
        }
        if repeats := too_many_epochs(train, self.name, self.data.train, samples):
            rows["epochs"] = repeats
        if experiment.without_effect:
            rows["no effect"] = ", ".join(experiment.without_effect)
        if all(getattr(train, rule) for rule in DOCUMENT_RULES):
            rows["prompts"] = "eod_mask_loss trains nothing that follows end-of-text: generate needs a prompt"
        if self.prediction:
            rows |= _predicted_rows(self.prediction, left)
        return f"{text_table(rows.items())}\n\n{self._data_table(samples)}"

    def as_dict(self, done: int = 0, consumed_samples: int = 0) -> dict[str, Any]:
        """The plan for plan.json: its `text`, the layout, and the predicted duration."""
        document: dict[str, Any] = {"text": self.text(done, consumed_samples), "layout": self.layout}
        document["samples_per_epoch"] = self.data.train.per_epoch
        if prediction := self.prediction:
            document["memory"] = {part: round(value) for part, value in by_part(prediction.memory).items()}
            document |= {"memory_bytes": round(prediction.memory_bytes), "machine_bytes": prediction.machine.memory}
            if prediction.machine.timed:
                document |= {"seconds": self.seconds, "tokens_per_second": prediction.tokens_per_second}
        return document

    @property
    def layout(self) -> str:
        """The layout in words: factors, sequence parallelism, ZeRO, pipeline and recompute."""
        experiment, parallel = self.experiment, self.experiment.parallel
        notes = [parallel.factors]
        if parallel.tensor > 1 and parallel.sequence_parallel:
            notes.append("sequence parallel")
        if parallel.data > 1:
            as_stage_1 = parallel.zero_stage == 2 and parallel.pipeline > 1
            same = " (as ZeRO 1: a pipeline scatters gradients once per step)" * as_stage_1
            notes.append(f"ZeRO {parallel.zero_stage}{same}")
        if parallel.pipeline > 1:
            layers = stage_layers(experiment.model.n_layer, parallel.pipeline * parallel.virtual_stages)
            idle = bubble_share(parallel.pipeline, parallel.virtual_stages, experiment.accumulation)
            each = "+".join(str(len(stage)) for stage in layers)
            notes.append(f"{parallel.schedule}, {each} layers, idle {idle:.1%} of the time")
        if experiment.train.recompute != "none":
            notes.append(f"{experiment.train.recompute} recompute")
        return "; ".join(notes)

    def _data_table(self, samples: int) -> str:
        """One line for each split of each corpus; `samples`: of the whole run."""
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
        if (moved := int(self.data.train.rounding * samples)) > 0:
            lines += f"\nshares are rounded to 1/{MAX_PERIOD:,}: up to {moved:,} samples more or fewer than weights say"
        if self.data.test is None:
            lines += f"\nno test part: train.split {self.experiment.train.split} leaves no sample"
        return lines


def _predicted_rows(prediction: Prediction, iterations: int) -> dict[str, str]:
    """The rows of a run's plan: memory per process, and the time of `iterations`."""
    machine = prediction.machine
    parts = ", ".join(f"{part} {gib(value)}" for part, value in by_part(prediction.memory).items())
    unit = "process" if machine.device == "cpu" else "GPU"
    memory = f"predicted {gib(prediction.memory_bytes)} GiB of {gib(machine.memory)} per {unit}: {parts}"
    if not machine.timed:
        return {"memory": memory, "time": "not predicted"}
    total = duration(iterations * prediction.step_seconds)
    speed = f"{prediction.tokens_per_second:,.0f} tokens per second, MFU {prediction.mfu:.0%}"
    return {"memory": memory, "time": f"predicted {total} at {speed}"}


def duration(seconds: float) -> str:
    """`about 41 years`."""
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:,.0f} {unit}"
    return f"about {max(1, round(seconds))} s"


def make_plan(settings: Settings, name: str) -> Plan:
    """Open the corpora of a model; check that they and the initial weights fit its settings.

    Raises InputError or ConfigError. The weights are not checked if a checkpoint exists, even a
    damaged one.
    """
    experiment, datasets = settings.experiment(name), settings.datasets(name)
    for pattern in experiment.train.no_decay:
        if not fnmatch.filter(all_names(experiment.model.n_layer), pattern):
            raise ConfigError(
                f"models.{name}.train.no_decay: no parameter is called {pattern!r}; h.0.ln_1.weight is one"
            )
    tokenizer = partial(tokenizer_of, settings.tokenize)
    data = open_splits(datasets, experiment.train, experiment.model, name, tokenizer)
    if (experiment.train.keep_best or experiment.train.stop_after_no_improvement) and not data.valid.per_epoch:
        raise ConfigError(f"models.{name}.train.split leaves no validation part, but its loss decides; give it a share")
    plan = Plan(name, experiment, settings.tokenize, data)
    if experiment.finetune is not None and not checkpoint_folders(settings.model_folder(name)):
        check_finetune(experiment.model, name, experiment.finetune, plan.tokenizer)
    if experiment.train.sample_interval and plan.tokenizer.vocab_size != experiment.model.vocab_size:
        raise ConfigError(
            f"models.{name}.train.sample_interval: the tokenizer has {plan.tokenizer.vocab_size} tokens, the model "
            f"{experiment.model.vocab_size}; set tokenize.encoder_json and tokenize.vocab_bpe to those of the data"
        )
    return plan


def machine_of(world: "World", cluster: ClusterSettings) -> Machine:
    """The machine of a running job."""
    tasks = world.launch.local_world_size
    if world.device.type == "cpu":
        return this_cpu(tasks, threads_of(world.launch, cluster.cpus_per_task))
    import torch

    properties = torch.cuda.get_device_properties(world.device)
    return this_gpu(properties.name, properties.total_memory, cluster.gpus, tasks)


def fit_plan(plan: Plan, settings: Settings, world: "World") -> tuple[Plan, Settings]:
    """Complete the plan on the job's machine (a collective call); returns it with its new settings.

    Rank 0 chooses the layout if it is `auto`. Raises ConfigError on all ranks if the model is too
    large.
    """

    def decide() -> tuple[Settings, Machine]:
        machine = machine_of(world, settings.cluster)
        chosen = resolve(settings, plan.name, machine, world.size)
        if settings.cluster.min_nodes:  # the micro-batch may shrink
            chosen = on_processes(chosen, plan.name, world.size, machine)
        check_fits(chosen, plan.name, machine, done=newest_iteration(settings.model_folder(plan.name)), here=True)
        return chosen, machine

    chosen, machine = run_on_rank0(decide, world.rank)
    return replace(plan, experiment=chosen.models[plan.name], machine=machine), chosen
