"""The configuration of a whole run, and its paths."""

import difflib
import re
from collections.abc import Iterable
from glob import iglob
from pathlib import Path
from typing import Self

from pydantic import field_validator, model_validator

from common.errors import ConfigError
from common.settings.cluster import ClusterSettings
from common.settings.corpus import CorpusSettings
from common.settings.experiment import DataSettings, Experiment
from common.settings.training import EvaluateSettings, GenerateSettings

_DATASET = Path("dataset/corpus_text_document")


def closest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'clean'?)`, or the empty string if no known name is close."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


class Settings(CorpusSettings):
    """One run: URL lists or existing text, one corpus, any number of models."""

    train_models: list[str] | None = None
    """Models that `snakemake all` trains; `[]` for none. Without the key it trains the only model,
    and stops if there are several. Every model has its target `train_<name>`.
    """
    models: dict[str, Experiment] = {}
    """Models by name."""
    cluster: ClusterSettings = ClusterSettings()
    """Where training jobs run."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """The held-out loss at the end of `all`."""
    generate: GenerateSettings = GenerateSettings()
    """The text sample at the end of `all`."""

    @field_validator("models")
    @classmethod
    def _names_are_words(cls, models: dict[str, Experiment]) -> dict[str, Experiment]:
        for name in models:
            if not re.fullmatch(r"[^\W\d][\w-]*", name):
                raise ValueError(f"model name {name!r} must be letters, digits, _ and -, a letter first")
        return models

    @model_validator(mode="after")
    def _something_goes_in(self) -> Self:
        all_bring_data = self.models and all(model.data for model in self.models.values())
        if not self.urls and not self.sources and not all_bring_data:
            raise ValueError("give URL lists under `urls`, existing text under `sources`, or both")
        return self

    @model_validator(mode="after")
    def _trained_models_exist(self) -> Self:
        for name in self.models_of_all:
            if name not in self.models:
                raise ValueError(self._no_model(name))
            size, model = self.train_tokenizer.vocab_size, self.models[name]
            if size and not model.data and model.model.vocab_size != size:
                raise ValueError(
                    f"models.{name}.model.vocab_size is {model.model.vocab_size}, train_tokenizer.vocab_size {size}; "
                    "make them equal"
                )
        return self

    @property
    def models_of_all(self) -> list[str]:
        """The models that `snakemake all` trains; none while `train_models` has to choose."""
        only = list(self.models) if len(self.models) == 1 else []
        return only if self.train_models is None else self.train_models

    def cluster_of(self, model: str) -> ClusterSettings:
        """The cluster settings of a model's jobs; `cluster` for an unknown name."""
        own = self.models[model].slurm.model_dump(exclude_defaults=True) if model in self.models else {}
        return self.cluster.model_copy(update=own)

    def experiment(self, name: str) -> Experiment:
        """The settings of model `name`. Raises ConfigError that names the closest model."""
        if name not in self.models:
            raise ConfigError(self._no_model(name))
        return self.models[name]

    def _no_model(self, name: str) -> str:
        return f"no model {name!r} under models{closest(name, self.models)}"

    @property
    def dataset_prefix(self) -> Path:
        """PREFIX of the corpus' `.bin/.idx`, which merge_index writes and training reads."""
        return self.run / _DATASET

    def datasets(self, name: str) -> list[DataSettings]:
        """A model's training datasets: its own blend, or the corpora of this run and of `base`.

        The weights of these are their shares of all tokens, in ten-thousandths; equal until this
        run has a dataset.
        """
        prefixes = [run / _DATASET for run in (*self.base, self.run)]
        files = [prefix.with_name(f"{prefix.name}.bin") for prefix in prefixes]
        sizes = [file.stat().st_size for file in files] if all(map(Path.is_file, files)) else [1] * len(files)
        weights = [max(1, round(10_000 * size / (sum(sizes) or 1))) if self.base else 1 for size in sizes]
        own = [DataSettings(prefix=prefix, weight=each) for prefix, each in zip(prefixes, weights, strict=True)]
        return self.experiment(name).data or own

    def check_inputs(self) -> None:
        """Raise ValueError for a missing input that this run does not build."""
        sources = [pattern for source in self.sources if not source.is_remote for pattern in source.patterns]
        named = {"urls": self.urls, "sources": sources, "decontaminate.files": self.decontaminate.files}
        named["evaluate.task_dir"] = [str(folder) for folder in [self.evaluate.task_dir] if folder]
        named["blacklist.domain_lists"] = [str(path) for path in self.blacklist.domain_lists]
        if self.site is not None and not self.site.is_dir() and not self.site.is_relative_to(self.run):
            raise ValueError(f"site: {self.site}: no such folder")
        for key, patterns in named.items():
            for pattern in patterns:
                is_built = self.site is not None and Path(pattern).is_relative_to(self.site)
                if not is_built and not Path(pattern).exists() and not any(iglob(pattern, recursive=True)):
                    raise ValueError(f"{key}: {pattern}: no such file or folder")
        for name, model in self.models.items():
            for source in model.data:
                index = source.prefix.with_name(source.prefix.name + ".idx")
                if source.prefix != self.dataset_prefix and not index.is_file():
                    raise ValueError(f"models.{name}.data: {index}: no such file; give the PREFIX without its suffix")

    def model_folder(self, name: str) -> Path:
        """Folder of one model, with its checkpoints, logs and curves."""
        return self.run / "models" / name
