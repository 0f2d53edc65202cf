"""What a removal does to a model: which checkpoints read the documents, and their withdrawal.

A plan names datasets, and the numbers of documents in them. A model's checkpoints record the
checksum of each dataset that they were trained on, so that the next removal that names the model
makes up for earlier ones that did not.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from common import steps
from common.errors import InputError
from common.files import read_json, write_json
from corpus.index import content_of
from training.model_folder import checkpoint_folders, iteration_of
from training.trace import Trace


class ModelPlan(TypedDict):
    """The effects of a removal on a model that was trained on the documents' datasets."""

    first_read: int | None
    """The first iteration that read one of the documents."""
    tokens_read: int
    exact: str | None
    """The newest checkpoint before that iteration; later ones are `withdrawn` to `aside`."""
    withdrawn: list[str]
    aside: str
    contents: dict[str, list[str]]
    """The checksums of each dataset since the checkpoints were saved."""


class Tombstones(TypedDict):
    """The removed documents' numbers by dataset, and each dataset's checksum before the removal."""

    datasets: dict[str, list[int]]
    contents: dict[str, str]


def relative(run: Path, path: Path) -> str:
    """The name of a path in a plan: relative to the run, absolute if it lies outside."""
    return str(path.relative_to(run) if path.is_relative_to(run) else path.absolute())


def plan_model(run: Path, folder: Path, records: Sequence[Tombstones]) -> ModelPlan | None:
    """Plan what a removal from `run` does to a model; None if it was not trained on the documents.

    Covers all records since its newest checkpoint: earlier removals may not have named the model.
    """
    trace, checkpoints = Trace(folder), checkpoint_folders(folder)
    names = {(run / name).resolve(): name for record in records for name in record["datasets"]}
    trained_on = dict(enumerate(read_json(checkpoints[0] / "manifest.json")["content"] if checkpoints else ()))
    contents, removed = dict[str, list[str]](), dict[int, list[int]]()
    for corpus, prefix in enumerate(trace.prefixes):
        if (name := names.get(prefix.resolve())) is None:
            continue
        removals = [record for record in records if name in record["datasets"]]
        history = [record.get("contents", {}).get(name, "") for record in removals] + [content_of(prefix)]
        saved = trained_on.get(corpus, history[-1])
        first = history.index(saved) if saved in history else 0
        if first < len(removals):
            contents[name] = history[first:-1]
            removed[corpus] = [number for record in removals[first:] for number in record["datasets"][name]]
    if not removed:
        return None
    if (folder / "owner.json").is_file():
        raise InputError(f"{folder}/owner.json: a training has this folder; stop it, or remove the file if it is dead")
    reads = [trace.reads(corpus, numbers) for corpus, numbers in removed.items()]
    first_read = min((int(read.iterations.min()) for read in reads if len(read.iterations)), default=None)
    saves = [path.name for path in checkpoints]
    withdrawn = [name for name in saves if first_read is not None and iteration_of(Path(name)) >= first_read]
    aside = 1 + max((int(path.name) for path in folder.glob("withdrawn/[0-9]*")), default=0)
    return {
        "first_read": first_read,
        "tokens_read": sum(int(read.tokens.sum()) for read in reads),
        "exact": next((name for name in saves if name not in withdrawn), None),
        "withdrawn": withdrawn,
        "aside": f"withdrawn/{aside:04d}",
        "contents": contents,
    }


def withdraw(run: Path, folder: Path, plan: ModelPlan) -> None:
    """Withdraw checkpoints and their results; record the new checksums in the other checkpoints."""
    aside, owner = folder / plan["aside"], folder.parent.parent
    if plan["withdrawn"]:
        moved = {folder / name: name for name in plan["withdrawn"]}
        deleted = [folder / "done.json", folder / "latest", folder / "best"]
        if folder.parent.name == "models":
            moved[steps.result("merge", owner, folder.name).parent] = "merged"
            deleted += [steps.result(name, owner, folder.name) for name in ("evaluate", "generate")]
        aside.mkdir(parents=True, exist_ok=True)
        for path, name in moved.items():
            if path.exists():
                path.rename(aside / name)
        for path in deleted:
            path.unlink(missing_ok=True)
    contents = {old: content_of(run / prefix) for prefix, history in plan["contents"].items() for old in history}
    for checkpoint in checkpoint_folders(folder):
        manifest = read_json(checkpoint / "manifest.json")
        manifest["content"] = [contents.get(content, content) for content in manifest["content"]]
        write_json(checkpoint / "manifest.json", manifest)
