"""Tells, before a run starts, what changed settings make it do again, and what it keeps.

results/x: settings changed since it was started last
  clean.min_characters 512 -> 600
runs again: clean (2 jobs), dedup (2), tokenize (2), merge_index
runs: train, merge
stays: 2 journals of fetched pages, checkpoints of tiny
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from common import steps
from common.config import given_in, load_settings
from common.console import note
from common.errors import ConfigError
from common.settings import Settings, changes, names

_LONGEST = 100  # characters of a changed key


def describe(settings: Settings, again: Iterable[str], first: Iterable[str] = ()) -> str:
    """The text above; empty if the settings are those of the last start.

    `again`: the rules of jobs that run again; `first`: those of jobs that have not been done yet.
    """
    last, run = settings.run / "config.yaml", settings.run
    if not last.is_file():
        return ""
    try:
        then, now = (each.model_dump(mode="json") for each in (load_settings(last), settings))
    except ConfigError:  # damaged; it is written again
        return ""
    given, own = given_in(last), {*names(settings.model_dump(mode="json", exclude_defaults=True))}
    # a default that changed with the toolkit is no changed setting, unless it repeats a step
    differ = [line for line in changes(then, now) if again or given is None or line.partition(" ")[0] in given | own]
    changed = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …" for line in differ]
    if not changed:
        return ""
    lines = [f"{run}: settings changed since it was started last", *(f"  {line}" for line in changed)]
    for what, rules in (("runs again", again), ("runs", first)):
        jobs = Counter(map(steps.of_rule, rules))
        counts = [name if count == 1 else f"{name} ({count} jobs)" for name, count in jobs.items()]
        lines += [f"{what}: {', '.join(counts)}"] * bool(counts)
    if len(lines) == len(changed) + 1:
        lines.append("runs again: nothing")
    pages = len(list((run / steps.named("scrape").folder).glob("*.journal")))
    trained = sorted({path.parent.name for path in (run / steps.named("train").folder).glob("*/iter_*")})
    kept = [f"{pages} journals of fetched pages"] * bool(pages)
    kept += [f"checkpoints of {', '.join(trained)}"] * bool(trained)
    return "\n".join([*lines, f"stays: {', '.join(kept)}"] if kept else lines)


def announce(settings: Settings, dag: Any) -> None:
    """Print it for the jobs of a DAG; those with a record or a result were done before."""
    records = dag.workflow.persistence
    order = [step.name for step in (*steps.CORPUS, *steps.MODELS)]
    again, first = list[str](), list[str]()
    for job in dag.needrun_jobs():
        if steps.of_rule(job.rule.name) in order:
            done = any(Path(path).exists() or records.metadata(path) is not None for path in job.output)
            (again if done else first).append(job.rule.name)
    if "fetch" in (*again, *first):
        from corpus.remote import listing  # takes half a second

        folder = settings.fetch_folder
        for source in settings.remote_sources:
            if line := listing.describe(folder, source, listing.read_listing(folder, source)):
                note(line)
    in_order = partial(sorted, key=lambda rule: order.index(steps.of_rule(rule)))
    if text := describe(settings, in_order(again), in_order(first)):
        note(text)
