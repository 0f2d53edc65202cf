"""The toolkit's errors. Each message is one line: what is wrong, where, and the cure.

ToolkitError
├── InputError         a file, folder or argument that is missing, empty, truncated or malformed
│   ├── EncodingError  a text that is not UTF-8, or too long for one document
│   └── TruncatedError a file that ends inside a record
├── ConfigError        a key of the configuration, named with its full path
├── EmptyResultError   a step that would end without a single document
├── OutageError        the network is down, so failed requests say nothing about the pages
├── CheckpointError    a checkpoint that is missing, incomplete or does not fit the model
│   ├── CheckpointVersionError  a checkpoint that only another version of the toolkit may read
│   └── ProofError     a converted model that does not compute what its source computes
├── TrainingError      training that must stop: non-finite numbers, a loss spike
│   └── LostLockError  a newer job has locked the model folder
└── JobError           a job that failed; the message of a submitted one quotes the end of its log
    ├── LostRankError  another process of the job died; rerun the command to resume
    └── KernelError    a GPU kernel that cannot be built, loaded or launched

PageError              why one page has no text; caught by the crawl, never shown to users
"""

USER_ERROR = 2  # an error that a person must cure first
RESUME_ME = 75  # a temporary failure (EX_TEMPFAIL of sysexits.h): rerun to resume
LOCK_LOST = 76  # a newer job has locked the model folder; nothing is left to do here

_HOST_FAILURES = frozenset(
    {"connection", "dns", "tls", "timeout", "robots_unreachable", "tdmrep_unreachable", "http_429", "host_parked"}
)


class ToolkitError(Exception):
    """Base of the tree; `common.cli` turns it into one line on stderr and an exit code."""

    exit_code = USER_ERROR


class InputError(ToolkitError):
    """A file, folder or argument that is missing, empty, truncated or malformed."""


class EncodingError(InputError):
    """A text file that is not UTF-8, or too long for one document."""


class TruncatedError(InputError):
    """A file that ends inside a record."""


class ConfigError(ToolkitError):
    """A key of the configuration that is unknown, of the wrong type, or contradicts another."""


class EmptyResultError(ToolkitError):
    """A step that would end without a single document."""


class OutageError(ToolkitError):
    """The network is down, so failed requests say nothing about the pages."""

    exit_code = RESUME_ME  # Snakemake tries again


class CheckpointError(ToolkitError):
    """A checkpoint that is missing, incomplete or does not fit the model."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint that only another version of the toolkit may read."""


class ProofError(CheckpointError):
    """A converted model that does not compute what its source computes; nothing was written."""

    exit_code = 1


class TrainingError(ToolkitError):
    """Training that must stop: non-finite numbers or a loss spike."""


class LostLockError(TrainingError):
    """A newer job has locked the model folder; this one ends without writing to it."""

    exit_code = LOCK_LOST


class JobError(ToolkitError):
    """A job that failed."""


class LostRankError(JobError):
    """Another process of the job died or cannot be reached; rerun to resume."""

    exit_code = RESUME_ME


class KernelError(JobError):
    """A GPU kernel that cannot be built, loaded or launched."""


class PageError(Exception):
    """Why a page has no text, and whether a retry may succeed, after `wait` seconds or more."""

    def __init__(self, reason: str, *, transient: bool = False, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.transient, self.wait = reason, transient, wait
        self.off_site = False
        """Whether it happened on another site, after a redirect."""
        self.no_response = False
        """Whether there was no response at all: the network may be down."""
        self.refused_url = ""
        """The target of a redirect that the URL rules refuse, if that is the reason."""

    @property
    def host_failed(self) -> bool:
        """Whether the host failed (down, busy), not only this page."""
        return not self.off_site and (self.reason in _HOST_FAILURES or self.reason.startswith("http_5"))
