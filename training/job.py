"""One training job, from its start to its last checkpoint; every process of the job runs this."""

import math
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from common import run_card
from common.console import say
from common.errors import ConfigError, InputError
from common.files import read_rows, write_json, write_text
from common.settings import TrainSettings, changes
from corpus.index import suffixed
from training import checkpoint
from training.checkpoint import Manifest, Progress, SavedRun
from training.checkpoint.writing import CheckpointWriter
from training.dataset.blend import Blend
from training.huggingface.pretrained import load_finetune
from training.launch.preflight import preflight
from training.launch.process_group import World
from training.launch.rank import starting
from training.metrics.boards import open_boards
from training.metrics.device import device_name
from training.metrics.logger import MetricsLogger
from training.metrics.profile import Profile
from training.monitoring.garbage import collected_together
from training.monitoring.guard import Guard
from training.monitoring.heartbeat import Heartbeat
from training.monitoring.run_lock import RunLock
from training.monitoring.stop import Stop
from training.operations import choose_operations
from training.optimizer import rate_change, steps_taken
from training.parallel.collectives import all_gather, run_on_all_ranks
from training.parallel.layout import is_compiled, make_mesh
from training.planning.run import Plan, duration
from training.session import Session, open_session
from training.step import run_micro_batches, step_batches
from training.trainer import Trainer

_LONGEST = 28 * 24 * 3600  # seconds of a run on CPUs; a busy machine may seem several times slower than it is


def run_training(plan: Plan, folder: Path, world: World, settings: str) -> bool:
    """Train the model of `folder` from its newest checkpoint or the start; True once finished.

    If asked to stop early, it saves a checkpoint; the next start resumes from it. The plan is
    printed and written to plan.json, and `settings` to settings.yaml, unless the model is finished.
    """
    experiment, train, data, on_rank0 = plan.experiment, plan.experiment.train, plan.data, world.rank == 0
    newest = checkpoint.newest(folder)
    if newest is not None:
        fits = partial(checkpoint.check_fits, newest, name=folder.name, experiment=experiment, data=data.train)
        run_on_all_ranks(fits if on_rank0 else lambda: None)
        if end := newest.progress.end(train):
            if on_rank0:
                say(f"{newest.path}: already at {end}")
                _write_done(folder, newest, train)
            return True

    lock = RunLock(folder, world.rank, world.launch.key)
    lock.take()
    if on_rank0:
        _write_start(folder, newest, plan, world, settings)
    job = f"{world.launch.key}-{lock.token}"
    with Heartbeat(folder, world.rank, experiment.watch.silence_seconds, job) as heartbeat:
        starting(world.rank, "checks the nodes and their connections")
        mesh = make_mesh(experiment.parallel, world.device.type)
        preflight(world, mesh, folder, experiment.model)
        heartbeat.beat(0, "operations")  # may take minutes, in which the other ranks wait
        choose_operations(experiment, world, folder, plan.seconds)
        starting(world.rank, "builds the model")
        session = open_session(experiment, world, mesh)
        progress = _load(session, newest, plan)
        if newest is None and world.device.type == "cpu" and not train.allow_slow:
            _check_speed(session, data.train, folder.name)
        config, at = experiment.model_dump(mode="json"), progress.iteration
        boards = open_boards(experiment.log, folder.name, folder, at, config, on_rank0=on_rank0)
        saved = SavedRun(folder, experiment, plan.tokenize, data.train, lock.require, lock.token)
        with (
            Stop(folder, lock) as stop,  # before it, a signal ends the process at once
            CheckpointWriter(saved, session.parameters, session.optimizer) as writer,
            MetricsLogger(folder, session, boards, progress, plan.attention, lock.is_held) as logger,
            Profile(folder, train, world) as profile,
            collected_together() as collect,
        ):
            guard = Guard(train, experiment.watch, progress.guard)
            tokenizer = plan.tokenizer if train.sample_interval else None
            trainer = Trainer(
                session, data, folder, lock, stop, heartbeat, guard, writer, logger, progress, tokenizer,
                begin=(collect, profile.begin),
            )  # fmt: skip
            compiles = ", which compiles the model" * is_compiled(train.compile, world.device)
            starting(world.rank, f"iteration {at + 1}{compiles}")
            with closing(step_batches(session, data.train, progress.consumed_samples)) as batches:
                trainer.run(batches)
        finished = bool(trainer.progress.end(train))
        if finished and on_rank0:
            assert writer.newest is not None
            _write_done(folder, checkpoint.read_manifest(writer.newest), train)
    with suppress(OSError):  # the run is over; its lock is only tidied up
        lock.release()
    return finished


def _write_start(folder: Path, newest: Manifest | None, plan: Plan, world: World, settings: str) -> None:
    """Print the plan and changed settings; write plan.json, settings.yaml and run.json."""
    experiment = plan.experiment
    start = newest.progress if newest is not None else Progress(0, 0)
    if newest is not None:
        say(f"resumed from {newest.path}: {experiment.train.iterations - start.iteration:,} iterations left")
        then, now = ({key: one.recipe[key] for key in ("model", "train")} for one in (newest.experiment, experiment))
        if changed := changes(then, now):
            say(f"changed since {newest.path.name}: {', '.join(changed)}")
    kept = plan.as_dict(start.iteration, start.consumed_samples)
    say(kept["text"])
    write_json(folder / "plan.json", kept)
    write_text(folder / "settings.yaml", settings)
    prefixes = [part.corpus.prefix for part in plan.data.train.parts]
    inputs = [suffixed(prefix, suffix) for prefix in prefixes for suffix in (".bin", ".idx")]
    inputs += [experiment.finetune] if experiment.finetune else []
    more = {"job": world.launch.key, "processes": world.size, "device": device_name(world.device)}
    run_card.write_card(folder / run_card.NAME, settings=folder / "settings.yaml", inputs=inputs, **more)
    _ = plan.data.train.content  # cached now: the files may change during the run
    (folder / "done.json").unlink(missing_ok=True)  # it was finished before train.iterations was raised


def _load(session: Session, newest: Manifest | None, plan: Plan) -> Progress:
    """Load the newest checkpoint, or the weights to fine-tune; returns the progress of the run."""
    experiment, rank = session.experiment, session.world.rank
    if newest is not None:
        starting(rank, f"loads {newest.path}")
        checkpoint.load(newest, session.parameters, session.optimizer)
        if session.world.rank == 0:
            taken = steps_taken(session.optimizer)
            if change := rate_change(newest.experiment.train, experiment.train, taken):
                say(change)
        return newest.progress
    if experiment.finetune is not None:
        start, seed = experiment.finetune, experiment.train.seed
        starting(rank, f"loads {start}")
        new = load_finetune(session.parameters, experiment.model, start, plan.tokenizer, seed)
        if new and session.world.rank == 0:
            say(f"{new} tokens are not in {start}: their embeddings start from random values")
    return Progress(0, 0)


def _check_speed(session: Session, data: Blend, name: str) -> None:
    """Raise ConfigError if a run on CPUs would take months (a collective call).

    Times three passes: each is one micro-batch forward and backward, or all that a pipeline runs at
    once. No number of the run changes: each step seeds its streams and drops old gradients.
    """
    experiment = session.experiment
    starting(session.world.rank, "times a step, as a run on CPUs may take too long")
    with closing(step_batches(session, data, 0)) as batches:
        batch = next(batches)[: None if session.pipeline else 1]
    step = math.inf  # seconds
    for _ in range(3):
        session.streams.start_iteration(1)
        begun = time.perf_counter()
        run_micro_batches(session, batch, 1.0, train=True)
        elapsed = max(all_gather(time.perf_counter() - begun))
        step = min(step, elapsed * experiment.accumulation / len(batch))
        session.optimizer.zero_grad()
        session.timers.take()
        if step * experiment.train.iterations <= _LONGEST:
            return
    raise ConfigError(
        f"models.{name} would take {duration(step * experiment.train.iterations)} on these CPUs, at {step:.3g} s per "
        "iteration (the best of three); train a smaller model, or on GPUs, or set train.allow_slow=true to start anyway"
    )


def _write_done(folder: Path, last: Manifest, train: TrainSettings) -> None:
    """Write MODEL_FOLDER/done.json: where the run ended, taken from its files alone."""
    early = {"validations_without_improvement": last.best.get("since", 0)} if last.iteration < train.iterations else {}
    write_json(
        folder / "done.json",
        {
            "iteration": last.progress.iteration,
            "checkpoint": last.path.name,
            "consumed_samples": last.progress.consumed_samples,
            "train_loss": _last_value(folder / "train.csv", "lm_loss"),
            "valid_loss": _last_value(folder / "valid.csv", "loss"),
            **early,
        },
    )


def _last_value(curve: Path, column: str) -> float | None:
    """The last value of a curve; None if the file is missing or damaged: the run is done anyway."""
    try:
        return float(read_rows(curve)[-1][column])
    except (LookupError, ValueError, TypeError, InputError):
        return None
