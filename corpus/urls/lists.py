"""Lists of URLs, one per line; blank lines and those that begin with `#` are skipped.

The list of a shard begins with LIST_BEGINS and ends with LIST_ENDS, so that a list without URLs
differs from a truncated one. A list that a person wrote needs neither.
"""

from pathlib import Path

from common.errors import InputError, TruncatedError
from common.files import read_lines

LIST_BEGINS, LIST_ENDS = "# corpus.blacklist", "# end"
_CURE = "make it again: python -m corpus.blacklist, or `snakemake -R blacklist` for that of a run; fetched pages stay"


def read_urls(path: Path, allow_empty: bool = False) -> list[str]:
    """The URLs of a list. Raises InputError for other data, TruncatedError for a truncated list.

    A list without URLs raises InputError, except a shard's list with `allow_empty`.
    """
    urls, begins, line = [], "", ""
    for number, data in enumerate(read_lines(path), start=1):
        try:
            line = data.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise InputError(f"{path}:{number}: not UTF-8; run the list through corpus.blacklist first") from None
        if "\0" in line:
            raise InputError(f"{path}:{number}: zeros instead of URLs; {_CURE}")
        begins = begins or line
        if line and not line.startswith("#"):
            urls.append(line)
    if not urls and not allow_empty:
        raise InputError(f"{path}: no URLs inside; give a list with one URL per line")
    if line != LIST_ENDS and (not urls or begins == LIST_BEGINS):
        raise TruncatedError(f"{path}: {'cut short' if begins else 'an empty file'}; {_CURE}")
    return urls
