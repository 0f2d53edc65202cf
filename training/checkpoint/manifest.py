"""manifest.json, written last: progress, settings, identity of the data, and a hash per file.

A vocabulary other than the packaged one is copied to MODEL_FOLDER/tokenizer. The manifest names the
copies relative to the model folder, which can therefore be moved.

`given` names the settings that differ from their default. As in settings.yaml, a later version of
the toolkit ignores other settings that it lacks.
"""

import math
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.config import of_this_version
from common.errors import CheckpointError, CheckpointVersionError, InputError
from common.files import atomic_path, digest, read_json, write_json
from common.settings import Experiment, ModelSettings, ParallelSettings, TokenizeSettings, TrainSettings, names
from training.checkpoint.files import THREADS
from training.checkpoint.replicas import Replicas
from training.model_folder import is_end

MANIFEST = "manifest.json"
FORMAT = 2
_SETTINGS = {"model", "parallel", "train", "tokenize"}
_VOCABULARY = {"encoder_json": "tokenizer/encoder.json", "vocab_bpe": "tokenizer/vocab.bpe"}


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    iteration: int
    """Optimiser steps done."""
    consumed_samples: int
    """Position in the training order."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """State of `training.monitoring.guard`."""
    journal: Mapping[str, Any] = field(default_factory=dict)
    """State of the metrics logger: figures not reported yet."""
    best: Mapping[str, Any] = field(default_factory=dict)
    """The lowest validation `loss`, its `iteration`, the validation runs `since`, and the steps
    `taken` before the last validation run. Empty before the first."""

    def with_loss(self, loss: float, taken: int) -> "Progress":
        """The progress after a validation run with this loss; NaN is no improvement.

        `taken` counts optimiser steps. If all steps since the last validation run were skipped, as
        float16's first ones are, the model has not changed: the run does not count.
        """
        if taken == self.best.get("taken"):
            return self
        if loss < self.best.get("loss", math.inf):
            return replace(self, best={"loss": loss, "iteration": self.iteration, "since": 0, "taken": taken})
        return replace(self, best={**self.best, "since": self.best.get("since", 0) + 1, "taken": taken})

    def end(self, train: TrainSettings) -> str:
        """Why the run ends here, or "" if it continues."""
        since, at = self.best.get("since", 0), f"iteration {self.iteration} of {train.iterations}"
        if not is_end(train, self.iteration, since):
            return ""
        if self.iteration >= train.iterations:
            return at
        return f"{at}: no validation loss below {self.best.get('loss', math.inf):.4f} in {since} runs"


class Manifest(BaseModel):
    """The content of manifest.json."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    path: Path = Field(exclude=True)
    """The checkpoint's folder."""
    format: int = FORMAT
    iteration: int
    consumed_samples: int
    guard: dict[str, Any]
    journal: dict[str, Any]
    best: dict[str, Any] = {}
    padded_vocab_size: int
    """Rows in the run's layout; the checkpoint has `model.vocab_size`."""
    model: ModelSettings
    parallel: ParallelSettings
    train: TrainSettings
    tokenize: TokenizeSettings
    data: str
    """`Blend.identity` of the training data."""
    content: list[str]
    """`Blend.content` of the training data."""
    end_of_text: int
    """Id of the token that ends a document."""
    replicas: Replicas
    torch: str
    """PyTorch's version."""
    files: dict[str, dict[str, Any]]
    """`{"size": bytes, "xxh3": hex}` by file name."""

    @property
    def progress(self) -> Progress:
        """The run's progress at this checkpoint."""
        return Progress(self.iteration, self.consumed_samples, self.guard, self.journal, self.best)

    @property
    def experiment(self) -> Experiment:
        """The run's settings, as far as they are recorded."""
        return Experiment.model_construct(model=self.model, parallel=self.parallel, train=self.train)


def copy_vocabulary(model_folder: Path, tokenize: TokenizeSettings) -> TokenizeSettings:
    """Copy missing vocabulary files to a model folder; returns settings with the relative paths."""
    copies: dict[str, Path] = {}
    for key, name in _VOCABULARY.items():
        original, copy = getattr(tokenize, key), model_folder / name
        if original is not None and (copy.exists() or original.is_file()):
            copies[key] = Path(name)
            if not copy.exists():
                with atomic_path(copy) as temporary:
                    shutil.copyfile(original, temporary)
    return tokenize.model_copy(update=copies)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint whose other files are complete."""
    given = [*names(manifest.model_dump(mode="json", include=_SETTINGS, exclude_defaults=True))]
    write_json(folder / MANIFEST, {**manifest.model_dump(mode="json"), "given": given})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, with vocabulary paths relative to the working directory.

    Raises CheckpointError if it is missing or damaged, CheckpointVersionError if it is of a version
    that this one cannot resume.
    """
    path = folder / MANIFEST
    try:
        raw = read_json(path)
    except (InputError, OSError):
        raise CheckpointError(f"{folder}: not a complete checkpoint (no readable {MANIFEST})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("format"), int):
        raise CheckpointError(f"{path}: not the manifest of a checkpoint; damaged")
    if raw["format"] != FORMAT:
        raise CheckpointVersionError(
            f"{path}: format {raw['format']}, this version of the toolkit reads {FORMAT}; use the one that wrote it"
        )
    given = raw.get("given")
    try:
        raw = of_this_version(raw | {"path": folder}, given if isinstance(given, list) else None, Manifest)
        manifest = Manifest.model_validate(raw)
    except ValidationError as errors:
        error = errors.errors()[0]
        if error["type"] == "extra_forbidden":
            raise CheckpointVersionError(
                f"{path}: {'.'.join(map(str, error['loc']))} is set, which this version of the toolkit does not know; "
                "use the one that wrote it"
            ) from None
        raise CheckpointError(f"{path}: damaged ({' '.join(str(errors).split())})") from None
    settings = manifest.tokenize
    copies = {key: folder.parent / name for key, name in _VOCABULARY.items() if getattr(settings, key) == Path(name)}
    return manifest.model_copy(update={"tokenize": settings.model_copy(update=copies)})


def verify(manifest: Manifest, share: slice = slice(None), *, content: bool = True) -> None:
    """Compare a share of a checkpoint's files with its manifest; without `content` only sizes.

    Raises CheckpointError for the first file that differs.
    """

    def check(name: str) -> None:
        path, expected = manifest.path / name, manifest.files[name]
        try:
            intact = path.stat().st_size == expected["size"] and (not content or digest(path) == expected)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing from its checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        if not intact:
            raise CheckpointError(f"{path}: damaged (size or checksum differs from {MANIFEST})")

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(check, sorted(manifest.files)[share]):
            pass
