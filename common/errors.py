"""Every error the toolkit raises on purpose. Each message is one line: what is wrong, where, and the cure.

ToolkitError
├── InputError         a file, folder or argument that is missing, empty, truncated or malformed
│   └── EncodingError  a text that is not UTF-8
├── ConfigError        a key of the configuration, named with its full path
├── EmptyResultError   a step that would end with no documents at all
├── OutageError        a network that is down, so that what failed says nothing
├── CheckpointError    a checkpoint that is absent, incomplete or does not fit the model
│   └── CheckpointVersionError  a checkpoint that only another version of the toolkit may read
├── TrainingError      a run that cannot go on: numbers that are not finite, a loss that leaps, a folder taken over
└── JobError           a submitted job that failed; the message quotes the end of its log

PageError              why one page has no text; caught by the crawl, never shown to a user
"""

from collections.abc import Sequence
from pathlib import Path

_HOST_FAILURES = frozenset({"connection", "dns", "tls", "timeout", "robots_unreachable", "http_429", "host_parked"})


class ToolkitError(Exception):
    """Base of the tree; `common.cli` turns it into one line on stderr and exit code 2."""


class InputError(ToolkitError):
    """A file, folder or argument that is missing, empty, truncated or malformed."""


class EncodingError(InputError):
    """A text file that is not UTF-8."""


class ConfigError(ToolkitError):
    """A key of the configuration that is unknown, of the wrong type, or contradicts another."""


class EmptyResultError(ToolkitError):
    """A step that would end with no documents at all."""

    @classmethod
    def no_documents(cls, inputs: Sequence[Path]) -> "EmptyResultError":
        """For a step whose input shards are all empty: the cause lies in the steps before it."""
        return cls(
            f"{inputs[0]}{' …' if len(inputs) > 1 else ''}: no documents in {len(inputs)} shard(s); "
            "the stats.json of the steps before say why every document was dropped"
        )


class OutageError(ToolkitError):
    """A network that is down, so that what failed says nothing; the same command does its work later."""


class CheckpointError(ToolkitError):
    """A checkpoint that is absent, incomplete or does not fit the model."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint that only another version of the toolkit may read."""


class TrainingError(ToolkitError):
    """A training run that must not go on: its numbers are not finite, its loss leaps, another job has its folder."""


class JobError(ToolkitError):
    """A submitted job that failed."""


class PageError(Exception):
    """Why a page has no text: the name of the reason, and whether another attempt could end differently.

    `wait` is the least number of seconds before that attempt, where the server named one.
    """

    def __init__(self, reason: str, *, transient: bool = False, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.transient, self.wait = reason, transient, wait
        self.elsewhere = False
        """Whether it happened on another site, behind a redirect."""
        self.silent = False
        """Whether nobody answered: the page may be well, and the network down."""
        self.refused = ""
        """The target of a redirect that the URL rules refuse."""

    @property
    def host_failed(self) -> bool:
        """Whether the host of the page is ill or busy; otherwise it answers, and only this page is odd or missing."""
        return not self.elsewhere and (self.reason in _HOST_FAILURES or self.reason.startswith("http_5"))
