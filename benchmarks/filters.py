"""Filters of `clean.filters` and datatrove's over the same documents: how often they decide alike, and their speed.

    pip install datatrove spacy
    python -m benchmarks.filters --texts corpus/clean

Both sides read the same text; the seconds are of CPU time.
"""

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from common import cli
from common.console import text_table
from common.files import expand_inputs, read_shards
from corpus.text.quality import c4, fineweb, gopher_repetition
from corpus.text.verdicts import Text

_RULES = {"c4": c4, "fineweb": fineweb, "gopher_repetition": gopher_repetition}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser("benchmarks.filters", description=__doc__)
    parser.add_argument(
        "--texts", type=cli.shards, nargs="+", required=True, metavar="PATH", help="shards of documents"
    )
    arguments = parser.parse_args(argv)
    from datatrove.data import Document
    from datatrove.pipeline import filters

    theirs = {
        "c4": filters.C4QualityFilter(),
        "fineweb": filters.FineWebQualityFilter(),
        "gopher_repetition": filters.GopherRepetitionFilter(),
    }
    counts, seconds = Counter[tuple[str, str]](), defaultdict[tuple[str, str], float](float)
    documents = 0
    for found in read_shards(expand_inputs(arguments.texts, "shards")):
        documents += 1
        for name, rule in _RULES.items():
            text, other = Text(found["text"]), Document(text=found["text"], id=found["id"])
            started = time.process_time()
            verdict = rule(text)
            ended = time.process_time()
            kept = theirs[name].filter(other) is True
            seconds[name, "theirs"] += time.process_time() - ended
            seconds[name, "ours"] += ended - started
            alike = kept != isinstance(verdict, str)
            cut = not isinstance(verdict, str) and verdict is not None and verdict.text != other.text
            counts[name, "alike"] += alike and not cut
            counts[name, "kept"] += kept
    rows = [["filter", "documents", "datatrove keeps", "decided alike", "ours/s", "datatrove/s"]]
    for name in _RULES:
        speeds = [f"{documents / seconds[name, side]:,.0f}" for side in ("ours", "theirs")]
        rows.append([name, f"{documents:,}", *(f"{counts[name, kind]:,}" for kind in ("kept", "alike")), *speeds])
    print(text_table(rows, "lrrrrr"))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
