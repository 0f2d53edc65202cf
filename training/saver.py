"""The checkpoints of a run while it trains: when they are written, and which are kept.

with Saver(session, folder) as saver:
    saver.save(progress)                # a collective call
saver.newest                            # the folder of the last one, complete
"""

from pathlib import Path
from types import TracebackType

from common.cli import say
from training import checkpoint
from training.checkpoint import Progress
from training.session import Session


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session, self.folder = session, folder
        self.newest: Path | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def save(self, progress: Progress) -> None:
        """Write a checkpoint (a collective call)."""
        session = self.session
        self.newest = checkpoint.save(self.folder, session.parameters, session.optimizer, progress, session.plan)
        if session.world.rank == 0:
            say(f"saved {self.newest}")
