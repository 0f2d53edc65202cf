"""The training loop: what one process does between the start of a job and its last checkpoint."""

import time
from contextlib import closing
from functools import partial
from pathlib import Path

from common.cli import say
from common.config import write_settings
from common.files import read_rows, write_json
from common.settings import Settings
from training import checkpoint
from training.checkpoint import Manifest, Progress
from training.data.blend import Blend
from training.distributed import World, gathered, one_voice
from training.finetune import load_start
from training.journal.journal import Journal
from training.optimizer import learning_rate
from training.plan import Plan
from training.saver import Saver
from training.session import Session, open_session
from training.step import held_out_loss, step_batches, train_step
from training.watch.diagnosis import first_non_finite
from training.watch.guard import Guard
from training.watch.heartbeat import Heartbeat
from training.watch.owner import Owner
from training.watch.stop import LEAVE, SAVE, Stop


def run_training(settings: Settings, plan: Plan, world: World) -> bool:
    """Train the plan's model from its newest checkpoint, or from nothing; returns whether it came to its end.

    It did not where it was asked to stop: its checkpoint is written, and the next start goes on from there.
    """
    folder = settings.run_folder(plan.name)
    train = plan.run.train
    with one_voice(world.rank):
        newest = checkpoint.newest(folder)
        if newest is not None:
            checkpoint.check_fits(newest, plan)
    if newest is not None and newest.progress.iteration >= train.iterations:
        if world.rank == 0:
            say(f"{newest.path}: already at iteration {newest.progress.iteration} of {train.iterations}")
            _write_done(folder, newest)
        return True

    owner = Owner(folder, world.rank, world.job)
    owner.take()
    if world.rank == 0:
        say(str(plan))
        write_settings(settings, folder / "settings.yaml")
        (folder / "done.json").unlink(missing_ok=True)  # more iterations were asked for: it is not done any more
    with Stop(folder, owner) as stop, Heartbeat(folder, world.rank, plan.run.watch.silence_seconds) as heartbeat:
        session = open_session(plan, world)
        progress = Progress(0, 0)
        if newest is not None:
            checkpoint.load(newest, session.parameters, session.optimizer)
            progress = newest.progress
            if world.rank == 0:
                say(f"resumed from {newest.path}")
        elif plan.run.finetune is not None:
            with one_voice(world.rank):
                load_start(session.parameters, plan.run, plan.name, plan.run.finetune)
        progress, last = _iterate(session, folder, progress, stop, heartbeat)
    done = progress.iteration >= train.iterations
    if done and world.rank == 0:
        _write_done(folder, checkpoint.read_manifest(last))
    owner.leave()
    return done


def _iterate(
    session: Session, folder: Path, progress: Progress, stop: Stop, heartbeat: Heartbeat
) -> tuple[Progress, Path]:
    """Iterate, report, validate and save until the last iteration, or until asked to stop."""
    run, train = session.plan.run, session.plan.run.train
    guard = Guard(run, progress.guard)
    with (
        Saver(session, folder, stop.owner.check) as saver,
        Journal(session, folder, progress) as journal,
        closing(step_batches(session, progress.consumed_samples)) as steps,
    ):
        for iteration in range(progress.iteration + 1, train.iterations + 1):
            heartbeat.beat(iteration, "data")
            asked = time.perf_counter()
            batches = next(steps)
            waited = time.perf_counter() - asked
            heartbeat.beat(iteration, "step")
            rate = learning_rate(iteration - 1, train)
            step = train_step(session, iteration, batches, rate, guard.scale, guard.accepts, stop.wanted())
            with one_voice(session.world.rank):
                if step.stop == LEAVE:
                    raise stop.owner.gone()
                guard.check(iteration, partial(first_non_finite, session, batches))
            progress = Progress(iteration, progress.consumed_samples + train.global_batch_size, guard.state())
            journal.step(step, rate, waited)
            if guard.spike:
                journal.say(f"warning: iteration {iteration}: {guard.spike}")

            last = iteration == train.iterations
            ends = last or step.stop == SAVE
            if ends or iteration % train.log_interval == 0:
                journal.report(progress, guard)
            with journal.pause():
                if session.plan.valid.per_epoch and (last or iteration % train.eval_interval == 0):
                    heartbeat.beat(iteration, "validation")
                    journal.validated(progress, _loss_on(session, session.plan.valid))
                if last and session.plan.test:
                    journal.validated(progress, _loss_on(session, session.plan.test), "test")
                if ends or iteration % train.save_interval == 0:
                    heartbeat.beat(iteration, "save")
                    with one_voice(session.world.rank):
                        saver.save(progress)
            if step.stop == SAVE:
                reasons = " and ".join(sorted({reason for reason in gathered(stop.reason) if reason}))
                journal.say(f"asked to stop by {reasons}: stopped after iteration {iteration}; start again to go on")
                stop.followed()
                break
        with one_voice(session.world.rank):
            saver.wait()
    assert saver.newest is not None
    return progress, saver.newest


def _loss_on(session: Session, part: Blend) -> float:
    """The loss on the first `train.eval_batches` global batches of a part, or all of it."""
    train = session.plan.run.train
    return held_out_loss(session, part, min(part.per_epoch, train.eval_batches * train.global_batch_size))


def _write_done(folder: Path, last: Manifest) -> None:
    """RUN/done.json: where the run ended, from its files alone."""
    train, valid = read_rows(folder / "train.csv"), read_rows(folder / "valid.csv")
    write_json(
        folder / "done.json",
        {
            "iteration": last.progress.iteration,
            "checkpoint": last.path.name,
            "consumed_samples": last.progress.consumed_samples,
            "train_loss": float(train[-1]["lm_loss"]) if train else None,
            "valid_loss": float(valid[-1]["loss"]) if valid else None,
        },
    )
