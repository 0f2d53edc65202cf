"""The training loop: what one process does between the start of a job and its last checkpoint."""

import time
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from common.config import write_settings
from common.console import say
from common.errors import InputError
from common.files import read_rows, write_json
from common.settings import Settings
from training import checkpoint
from training.checkpoint import Manifest, Progress
from training.checkpoint.saver import Saver
from training.dataset.blend import Blend
from training.huggingface.finetune import load_finetune
from training.metrics.logger import Journal
from training.monitoring.diagnosis import first_non_finite
from training.monitoring.guard import Guard
from training.monitoring.heartbeat import Heartbeat
from training.monitoring.run_claim import RunClaim
from training.monitoring.stop import LEAVE, SAVE, Stop
from training.optimizer import learning_rate, rate_change, steps_taken
from training.parallel.distributed import World, all_gather, run_on_all_ranks
from training.plan import Plan
from training.session import Session, open_session
from training.step import step_batches, train_step, validate


def run_training(settings: Settings, plan: Plan, world: World) -> bool:
    """Train the plan's model from its newest checkpoint, or from nothing; returns whether it came to its end.

    It did not where it was asked to stop: its checkpoint is written, and the next start goes on from there.
    """
    folder = settings.model_folder(plan.name)
    train, first = plan.experiment.train, world.rank == 0
    newest = checkpoint.newest(folder)
    if newest is not None:
        check = partial(checkpoint.check_fits, newest, name=plan.name, experiment=plan.experiment, data=plan.train)
        note = run_on_all_ranks(check if first else str)
        if note:
            say(f"note: {note}")
    if newest is not None and newest.progress.iteration >= train.iterations:
        if first:
            say(f"{newest.path}: already at iteration {newest.progress.iteration} of {train.iterations}")
            _write_done(folder, newest)
        return True

    owner = RunClaim(folder, world.rank, world.job)
    owner.take()
    if first:
        say(str(plan))
        write_settings(settings, folder / "settings.yaml")
        _ = plan.train.content  # read now: the files may change while the run goes on
        (folder / "done.json").unlink(missing_ok=True)  # more iterations were asked for: it is not done any more
    silence, job = plan.experiment.watch.silence_seconds, f"{world.job}-{owner.token}"
    with Stop(folder, owner) as stop, Heartbeat(folder, world.rank, silence, job) as heartbeat:
        session = open_session(plan, world)
        progress = Progress(0, 0)
        if newest is not None:
            checkpoint.load(newest, session.parameters, session.optimizer)
            progress = newest.progress
            if first:
                say(f"resumed from {newest.path}")
                if note := rate_change(newest.experiment.train, train, steps_taken(session.optimizer)):
                    say(note)
        elif plan.experiment.finetune is not None:
            load_finetune(session.parameters, plan.experiment.model, plan.experiment.finetune)
        progress = _iterate(session, folder, progress, stop, heartbeat)
    with suppress(OSError):  # what is left to do is tidying up
        owner.leave()
    return progress.iteration >= train.iterations


def _iterate(session: Session, folder: Path, progress: Progress, stop: Stop, heartbeat: Heartbeat) -> Progress:
    """Iterate, report, validate and save until the last iteration, or until asked to stop."""
    experiment, train, owner = session.plan.experiment, session.plan.experiment.train, stop.owner
    guard = Guard(experiment, progress.guard)
    taken = steps_taken(session.optimizer)  # position in the learning-rate schedule
    with (
        Saver(session, folder, owner.require, owner.token) as saver,
        Journal(session, folder, progress, owner.mine) as journal,
        closing(step_batches(session, progress.consumed_samples)) as steps,
    ):
        for iteration in range(progress.iteration + 1, train.iterations + 1):
            heartbeat.beat(iteration, "data")
            asked = time.perf_counter()
            batches = next(steps)
            waited = time.perf_counter() - asked
            heartbeat.beat(iteration, "step")
            rate = learning_rate(taken, train)
            step = train_step(session, iteration, batches, rate, guard.scale, guard.accepts, stop.wanted())
            taken += step.taken
            if step.stop == LEAVE:
                owner.check()
            guard.check(iteration, partial(first_non_finite, session, batches))
            consumed = progress.consumed_samples + train.global_batch_size
            journal.step(step, rate, waited)
            if guard.spike:
                journal.say(f"warning: iteration {iteration}: {guard.spike}")

            last = iteration == train.iterations
            ends = last or step.stop == SAVE
            progress = Progress(iteration, consumed, guard.state())
            if last or iteration % train.log_interval == 0:
                journal.report(progress, guard)
            progress = replace(progress, journal=journal.state())
            with journal.pause():
                if session.plan.valid.per_epoch and (last or iteration % train.eval_interval == 0):
                    heartbeat.beat(iteration, "validation")
                    journal.validated(progress, _loss_on(session, session.plan.valid))
                if last and session.plan.test:
                    journal.validated(progress, _loss_on(session, session.plan.test), "test")
                if ends or iteration % train.save_interval == 0:
                    heartbeat.beat(iteration, "save")
                    saver.save(progress)
            if step.stop == SAVE:
                reasons = " and ".join(sorted({reason for reason in all_gather(stop.reason) if reason}))
                saver.wait()
                if not last:
                    journal.say(
                        f"asked to stop by {reasons}: stopped after iteration {iteration}; start again to go on"
                    )
                stop.followed()
                break
        saver.wait()
        owner.check()
        if progress.iteration >= train.iterations and session.world.rank == 0:
            assert saver.newest is not None
            _write_done(folder, checkpoint.read_manifest(saver.newest))  # before anything is tidied up
    return progress


def _loss_on(session: Session, part: Blend) -> float:
    """The loss on the first `train.eval_batches` global batches of a part, or all of it."""
    train = session.plan.experiment.train
    return validate(session, part, min(part.per_epoch, train.eval_batches * train.global_batch_size))


def _write_done(folder: Path, last: Manifest) -> None:
    """RUN/done.json: where the run ended, from its files alone."""
    write_json(
        folder / "done.json",
        {
            "iteration": last.progress.iteration,
            "checkpoint": last.path.name,
            "consumed_samples": last.progress.consumed_samples,
            "train_loss": _last(folder / "train.csv", "lm_loss"),
            "valid_loss": _last(folder / "valid.csv", "loss"),
        },
    )


def _last(curve: Path, column: str) -> float | None:
    """The last value of a curve; None where the file is absent or spoilt: a run is done all the same."""
    try:
        return float(read_rows(curve)[-1][column])
    except (LookupError, ValueError, TypeError, InputError):
        return None
