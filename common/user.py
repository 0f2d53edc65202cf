"""A user without a name or a home folder, as in many containers: USER and HOME for libraries.

Snakemake, PyTorch and others ask for the user's name and for a place for caches. A user id that
/etc/passwd lacks has neither, and they end in a traceback.
"""

import getpass
import os
import tempfile
from pathlib import Path


def name_user() -> None:
    """Set USER, HOME and XDG_CACHE_HOME where libraries would find none, for children, too."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        os.environ["USER"] = str(os.getuid())
    home = Path(os.path.expanduser("~"))  # stays "~" if nobody knows it
    cache = home / ".cache"
    if not home.is_absolute() or not home.is_dir():
        os.environ["HOME"] = _own_folder()
    elif "XDG_CACHE_HOME" not in os.environ and not os.access(cache if cache.exists() else home, os.W_OK):
        os.environ["XDG_CACHE_HOME"] = _own_folder()


def _own_folder() -> str:
    """A folder for temporary files that only this user may open; the same one for every command."""
    folder = Path(tempfile.gettempdir(), f"urls-to-gpt2-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    ours = facts.st_uid == os.getuid() and not facts.st_mode & 0o077
    return str(folder) if ours else tempfile.mkdtemp(prefix="urls-to-gpt2-")
