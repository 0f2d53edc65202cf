"""Measure how well a model predicts text: loss, bits per byte, and tasks of lm_eval.

    python -m training.evaluate --checkpoint results/demo/models/tiny --data book.txt poems.jsonl
    python -m training.evaluate --checkpoint results/demo/merged/tiny --tasks lambada_openai

--checkpoint is a Hugging Face folder, a model folder (its newest complete checkpoint), one iter_*
folder, or MODEL/best (`train.keep_best`). --data is a PREFIX of .bin/.idx, a .jsonl file of
documents (or .jsonl.zst, .jsonl.gz, …), or any other file, read as one text. The tokens are cut
into windows of the model's sequence length that do not overlap; every token but the first is
predicted once. Several datasets get a line each, and the loss over all is the mean over their
tokens. --max-tokens takes windows evenly spaced over all data.

--part valid or test evaluates documents that the model was not trained on: checkpoints and merged
folders record their train.split. They also record train.reset_position_ids,
train.reset_attention_mask and train.eod_mask_loss, and the loss follows them, as the training's
validation does; a note says so. For a folder that records none, documents are not set apart, and
every token counts.

--tasks runs tasks of lm-evaluation-harness (`pip install 'urls-to-gpt2[eval]'`) on a Hugging Face
folder. Data are downloaded, unless they are in the cache of `datasets`, or named by a YAML file in
--task-dir.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import cli
from common.console import note
from common.errors import InputError
from common.files import check_outputs, is_readable, write_json
from common.run_card import NAME, write_card
from common.settings.training import DOCUMENT_RULES

if TYPE_CHECKING:
    from common.tokenizer import Tokenizer
    from training.model import GPT2


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.evaluate", __doc__)
    add = parser.add_argument
    add("--checkpoint", type=cli.checkpoint_path, required=True, metavar="FOLDER", help="model to evaluate")
    add("--data", type=cli.input_path, nargs="+", default=[], metavar="FILE|PREFIX", help="texts or datasets")
    add("--part", choices=("all", "train", "valid", "test"), default="all", help="part of a dataset")
    shares = "shares that define the parts (default: the checkpoint's train.split)"
    add("--split", metavar="A,B,C", help=shares)
    most = "evaluate at most N tokens, in windows evenly spaced over the data (default: all)"
    add("--max-tokens", type=cli.positive_int, metavar="N", help=most)
    add("--batch", type=cli.positive_int, metavar="N", help="windows per forward pass (default 8)")
    add("--tasks", nargs="+", default=[], metavar="NAME", help="tasks of lm-evaluation-harness")
    add("--task-dir", type=cli.input_path, metavar="DIR", help="folder with YAML files of more tasks")
    add("--max-samples", type=cli.positive_int, metavar="N", help="samples of each task (default: all)")
    add("--output", type=cli.output_file, metavar="FILE.json", help="also write the result as JSON")
    arguments = parser.parse_args(argv)
    checkpoint, paths = arguments.checkpoint, arguments.data
    _check_data(arguments)

    from corpus.index import suffixed

    files = (suffixed(path, suffix) for path in paths for suffix in (".bin", ".idx", ".json"))
    check_outputs([arguments.output], files)
    result: dict[str, Any] = {"checkpoint": str(checkpoint)}
    if arguments.tasks:
        from training.evaluation.harness import find_tasks, run_tasks
        from training.evaluation.scoring import BATCH

        manager = find_tasks(arguments.tasks, arguments.task_dir)
    if paths:
        result |= _on_data(arguments)
    if arguments.tasks:
        result |= run_tasks(checkpoint, arguments.tasks, manager, arguments.batch or BATCH, arguments.max_samples)
    if arguments.output is not None:
        write_json(arguments.output, result)
        if arguments.output.is_file():  # not a pipe
            inputs = [checkpoint, checkpoint / "training.json"]  # which has the hashes of a merged folder
            for path in paths:
                inputs += [suffixed(path, ".bin"), suffixed(path, ".idx")] if is_dataset(path) else [path]
            write_card(arguments.output.with_suffix(f".{NAME}"), inputs=inputs)
    return 0


def _on_data(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result on --data. The model is freed at the end."""
    from training.inference.load import load_model, origin_of
    from training.launch.device import precision_type

    checkpoint, paths, part = arguments.checkpoint, arguments.data, arguments.part
    split, origin = None, origin_of(checkpoint)
    if part != "all":
        split = arguments.split or origin.split
        if split is None:
            raise InputError(
                f"{checkpoint}: does not say which documents it was trained on; for --part {part} give "
                "--split, the train.split of its training"
            )
    model, tokenizer = load_model(checkpoint)
    model.dtype = precision_type("auto", model.wte.weight.device)
    about = {"data": ", ".join(map(str, paths)), "part": part} | ({"split": split} if split else {})
    rules = {key: True for key in DOCUMENT_RULES if getattr(origin, key)}
    if rules:
        note(f"{checkpoint}: evaluated with train.{' and train.'.join(rules)}, as it was trained")
    return {**about, **rules, **_losses(arguments, model, tokenizer, split, rules)}


def is_dataset(path: Path) -> bool:
    """Whether `path` is the PREFIX of a dataset."""
    from corpus.index import suffixed

    return suffixed(path, ".idx").is_file()


def _check_data(arguments: argparse.Namespace) -> None:
    """InputError for data that cannot be evaluated, before a model is loaded."""
    part, checkpoint = arguments.part, arguments.checkpoint
    if not arguments.data and not arguments.tasks:
        raise InputError("nothing to evaluate on; give --data, or --tasks alone")
    if arguments.tasks and not (checkpoint / "config.json").is_file():
        raise InputError(f"{checkpoint}: --tasks needs a Hugging Face folder; python -m convert.merge_mp makes one")
    if (arguments.task_dir or arguments.max_samples) and not arguments.tasks:
        raise InputError("--task-dir and --max-samples are for --tasks")
    for path in arguments.data:
        if not is_dataset(path) and not is_readable(path):
            raise InputError(f"{path}: neither a file nor the PREFIX of a dataset (PREFIX.bin, PREFIX.idx)")
        if not is_dataset(path) and part != "all":
            raise InputError(f"{path}: --part {part} needs a dataset, this is one file of text")


def _losses(
    arguments: argparse.Namespace,
    model: "GPT2",
    tokenizer: "Tokenizer | None",
    split: str | None,
    rules: dict[str, bool],
) -> dict[str, Any]:
    """Print and return the loss on all data; `each` has that of each dataset, if there are several.

    `rules`, by name, are fields of a BatchForm.
    """
    from training.dataset.batches import BatchForm
    from training.dataset.corpus import Corpus, Samples, split_documents
    from training.evaluation.scoring import BATCH, combine, evaluate, summary
    from training.huggingface.tokenizer import vocabulary_size
    from training.inference.load import require_tokenizer

    checkpoint, paths, part = arguments.checkpoint, arguments.data, arguments.part
    byte_lengths = tokenizer.byte_lengths if tokenizer and vocabulary_size(tokenizer) else None
    datasets = []
    for path in paths:
        if is_dataset(path):
            corpus = Corpus.open(path)
            corpus.check_vocabulary(model.settings.vocab_size, f"{checkpoint}: vocab_size", lambda: tokenizer)
        else:
            corpus = Corpus.of_text(path, require_tokenizer(tokenizer, checkpoint))
        documents = range(corpus.documents)
        if split is not None:
            documents = split_documents(split, corpus.documents, path, "--split")[part]
        datasets.append(Samples(corpus, documents, model.settings.seq_len))
    share = (arguments.max_tokens or math.inf) / max(1, sum(samples.tokens for samples in datasets))
    results: list[tuple[Path, dict[str, Any]]] = []
    for path, samples in zip(paths, datasets, strict=True):
        form = BatchForm(samples.corpus.end_of_text, **rules)
        result = evaluate(model, samples, byte_lengths, share, arguments.batch or BATCH, form)
        if result is None and part == "all":
            raise InputError(f"{path}: fewer than two tokens to evaluate; choose another file")
        print(f"{path} ({part}): {summary(result, part) if result else 'no targets, so no loss'}")
        if result:
            results.append((path, result))
    if len(results) < 2:
        return results[0][1] if results else {}
    total = combine([result for _, result in results])
    print(f"all: {summary(total, part)}")
    return {**total, "each": {str(path): result for path, result in results}}


if __name__ == "__main__":
    sys.exit(cli.run(main))
