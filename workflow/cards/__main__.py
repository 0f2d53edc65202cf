"""Write the dataset and model cards of a finished run, for publication.

    python -m workflow.cards --run results/demo
    python -m workflow.cards --run results/demo --output-dir cards

Writes README.md, a dataset card, and for each trained model models/NAME/README.md, a model card,
and models/NAME/training_content.md, the European Commission's public summary of training content.
All are in RUN/cards or --output-dir. Every figure comes from the run's files; what only a person
can say reads TO BE FILLED IN.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import cli, page
from common import steps as table
from common.errors import InputError
from common.files import REMOVED_IDS, removed_ids, shard_paths, write_text
from common.settings import Settings
from corpus.remote.listing import read_listing
from corpus.scrape.opt_outs import ROBOTS_REASONS, TDM_REASONS
from training.trace import Trace
from workflow.cards.content import read_content, recount, without_tombstones
from workflow.report.funnel import FunnelStep, funnel
from workflow.report.models import Model, trained_models
from workflow.runs import load_run

_OPT_OUTS = {"robots", "robots_unreachable", "crawl_delay"} | ROBOTS_REASONS | TDM_REASONS


def corpus_facts(settings: Settings) -> dict[str, Any]:
    """Facts about a run's corpus; `documents` are those left to tokenize, None if not counted."""
    run = settings.run
    steps = {step.name: step for step in funnel(run, settings)}
    last = [step for step in table.configured(settings) if step.unit == "documents" and step.file.endswith(".zst")]
    documents = steps.get(last[-1].name) if last else None
    shards = shard_paths(run / last[-1].folder, settings.shards, ".jsonl.zst") if last else []
    removed, tokenized = len(removed_ids([run / REMOVED_IDS])), steps.get("merge_index")
    dataset = tokenized and (tokenized.documents_out, tokenized.tokens)
    if documents and removed:  # the statistics count them
        documents = FunnelStep(documents.name, documents.unit)
        documents.add(recount(shards).as_dict())
        dataset = tokenized and without_tombstones(settings.dataset_prefix)
    kept = documents.kept_by.items() if documents else ()
    read = [steps[name] for name in ("scrape", "ingest") if name in steps]
    parts = (part for step in read for part in table.named(step.name).figures(run, settings.shards))
    return {
        "name": run.resolve().name,
        "settings": settings,
        "listings": {source.path: read_listing(settings.fetch_folder, source) for source in settings.remote_sources},
        "steps": steps,
        "documents": documents,
        "dataset": dataset,
        "languages": sorted((code, counts) for (key, code), counts in kept if key == "detected_language"),
        "opt_outs": [(reason, count) for step in read for reason, count in step.reasons if reason in _OPT_OUTS],
        "removed": removed,
        "fetched": [dates for part in parts if (dates := part.get("fetch_dates"))],
    }


def model_facts(trace: Trace, model: Model, own: Path) -> dict[str, Any]:
    """Facts about a model's training from its folder and data; `own` is the dataset of its run."""
    experiment, datasets = trace.settings.experiment(model.name), []
    for number, prefix in enumerate(trace.prefixes):
        epoch, taken = trace.order(number, 0).epoch, trace.blend.taken(trace.consumed, number)
        datasets.append(
            {
                "name": _name(prefix),
                "tokens": int(epoch.ends[-1]),
                "passes": taken / len(epoch.samples),
                "own": prefix.resolve() == own.resolve(),
            }
        )
    evaluated = ", ".join(_name(Path(each)) for each in (model.evaluation or {}).get("data", "").split(", "))
    return {
        **experiment.model.model_dump(),
        "title": model.name,
        "parameters": experiment.model.parameters,
        "n_positions": trace.seq_len,
        "iteration": trace.trained,
        "samples": trace.consumed,
        "split": trace.train.split,
        "experiment": experiment,
        "datasets": datasets,
        "evaluation": model.evaluation and {**model.evaluation, "dataset": evaluated},
    }


def _name(prefix: Path) -> str:
    """The name of a dataset: its run's, or its own if no run of the DAG made it."""
    return prefix.parents[1].name if prefix.parent.name == "dataset" else prefix.name


def write_cards(run: Path, output: Path, *, sme: bool = False) -> list[Path]:
    """Write the cards of a run; returns the files.

    Raises InputError if the run has neither corpus nor model.
    """
    written = dict[str, str]()
    settings = load_run(run)
    facts, foreign = corpus_facts(settings), settings.model_copy(update={"urls": [], "sources": []})
    if facts["documents"]:
        written["README.md"] = page.render("workflow.cards", "dataset_card.md", **facts)
    for model in trained_models(run):
        trace = Trace(run / "models" / model.name)
        own = model_facts(trace, model, settings.dataset_prefix)
        corpus = facts if any(dataset["own"] for dataset in own["datasets"]) else corpus_facts(foreign)
        content = read_content(trace, 5, 1000) if sme else read_content(trace, 10)  # the template, section 2.3
        values, folder = corpus | own | {"content": content, "sme": sme}, f"models/{model.name}"
        written[f"{folder}/README.md"] = page.render("training.huggingface", "model_card.md", **values)
        written[f"{folder}/training_content.md"] = page.render("workflow.cards", "training_content.md", **values)
    if not written:
        raise InputError(f"{run}: has no statistics of documents and no trained model yet")
    for name, text in written.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(output / name, text + "\n")
    return [output / name for name in written]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("workflow.cards", __doc__)
    parser.add_argument("--run", type=cli.input_path, required=True, metavar="DIR", help="`run` of a configuration")
    parser.add_argument("--output-dir", type=cli.output_folder, metavar="DIR", help="folder of the cards (RUN/cards)")
    parser.add_argument("--sme", action="store_true", help="fewer domains, as small and medium enterprises may list")
    arguments = parser.parse_args(argv)
    output = arguments.output_dir or arguments.run / "cards"
    print("\n".join(map(str, write_cards(arguments.run, output, sme=arguments.sme))))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
