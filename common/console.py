"""What the toolkit says to people: progress on stdout, notes and warnings on stderr."""

import os
import sys


def say(text: str) -> None:
    """Print a line at once. Ignore a closed pipe and a full disk, so that long jobs survive `| head`."""
    try:
        print(f"{text}\n", end="", flush=True)  # one write: several threads print
    except OSError:
        discard(sys.stdout.fileno())


def note(text: str) -> None:
    """Print a line to stderr that a person should know about and that stops nothing."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning to stderr: something is wrong, and the command continues without it."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def discard(descriptor: int) -> None:
    """Send further output of a file descriptor to /dev/null: its reader is gone, and the rest must still be flushed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
