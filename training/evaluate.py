"""How well a model foresees text: loss and perplexity, WikiText's perplexity a word, LAMBADA's last words.

    python -m training.evaluate --checkpoint results/demo/models/tiny --data results/demo/dataset/corpus_text_document
    python -m training.evaluate --checkpoint merged/tiny --data book.txt poems.jsonl --output books.json
    python -m training.evaluate --checkpoint merged/tiny --task wikitext --data wiki.test.tokens
    python -m training.evaluate --checkpoint merged/tiny --task lambada --data lambada_test.jsonl

--checkpoint is a Hugging Face folder, a training run (its newest checkpoint) or one iter_* folder. --data is a PREFIX
of .bin/.idx, a .jsonl file of documents (.zst, .gz, … too), or any other file, read as one text. The tokens are
cut into windows of the model's sequence length that do not overlap; every token but the first is predicted once. Of
several datasets each has its line, and the loss of all is the mean over their tokens. --part valid or test takes the
documents that the model was not trained on: a run and a folder of convert.merge_mp know their train.split.

--task wikitext reads one file in WikiText's form, wiki.test.tokens or wiki.test.raw, and gives the perplexity a word
that papers give: the text is detokenized, windows overlap by all but --stride tokens, and the loss is shared out over
the words of the file, line ends among them. --task lambada reads one file of {"text": …} lines and counts the texts
whose last word the model would choose, token for token.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import cli
from common.console import note
from common.errors import ConfigError, InputError
from common.files import check_outputs, is_readable, read_documents, read_lines, write_json

if TYPE_CHECKING:
    from common.tokenizer import Tokenizer
    from training.dataset.corpus import Corpus, Samples
    from training.model import GPT2

_BATCH = 8  # windows in one forward pass


def read_text_corpus(path: Path, tokenizer: "Tokenizer") -> "Corpus":
    """The documents of a text or JSON-lines file, each followed by end-of-text, as a corpus in memory."""
    import numpy as np

    from training.dataset.corpus import Corpus

    if ".jsonl" in path.suffixes:
        texts: Iterable[str] = (document["text"] for document in read_documents(path))
    else:
        texts = [b"\n".join(read_lines(path)).decode("utf-8", errors="replace")]
    end = np.array([tokenizer.end_of_text], np.int64)
    documents = [np.concatenate([tokenizer.encode(text).astype(np.int64), end]) for text in texts]
    if not documents:
        raise InputError(f"{path}: no documents")
    return Corpus.in_memory(path, documents)


def evaluate(model: "GPT2", samples: "Samples") -> dict[str, Any]:
    """Mean loss (nats a token) over all windows of `samples`, the short last one included."""
    import torch

    from training.evaluation.scoring import sum_of_losses
    from training.model import summed_loss
    from training.precision import autocast

    tail = samples.tail()
    predicted = samples.per_epoch * samples.seq_len
    total = sum_of_losses(model, samples, samples.per_epoch, _BATCH, "auto")
    if len(tail) > 1:
        device = next(model.parameters()).device
        tokens = torch.from_numpy(tail).to(device)[None]
        with torch.no_grad(), autocast("auto", device):
            total += float(summed_loss(model.eval()(tokens[:, :-1]), tokens[:, 1:]))
        predicted += len(tail) - 1
    if not predicted:
        raise InputError(f"{samples.corpus.prefix}: fewer than two tokens to evaluate; choose another file or part")
    return _result(total, predicted, samples.documents)


def _result(total: float, tokens: int, documents: int) -> dict[str, Any]:
    from training.evaluation.scoring import perplexity

    loss = total / tokens
    return {"loss": loss, "perplexity": perplexity(loss), "tokens": tokens, "documents": documents}


def evaluate_all(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result of several datasets together, each token weighing the same."""
    total = sum(result["loss"] * result["tokens"] for result in results)
    return _result(total, sum(result["tokens"] for result in results), sum(result["documents"] for result in results))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.evaluate", __doc__)
    parser.add_argument("--checkpoint", type=cli.input_path, required=True, metavar="DIR", help="model to evaluate")
    parser.add_argument(
        "--data", type=cli.input_path, nargs="+", required=True, metavar="FILE|PREFIX", help="texts or datasets"
    )
    parser.add_argument("--task", choices=("loss", "wikitext", "lambada"), default="loss", help="what to measure")
    parser.add_argument("--part", choices=("all", "train", "valid", "test"), default="all", help="part of a dataset")
    parser.add_argument(
        "--split", metavar="A,B,C", help="shares that define the parts (default: those of its training)"
    )
    parser.add_argument(
        "--stride",
        type=cli.positive_int,
        metavar="N",
        help="wikitext: tokens from one window to the next (default 32; the sequence length is quickest)",
    )
    parser.add_argument("--output", type=cli.output_file, metavar="FILE.json", help="write the result as JSON too")
    arguments = parser.parse_args(argv)

    from training.inference.load import load_model, trained_split

    for data in arguments.data:
        _check_data(data, arguments)
    from corpus.index import suffixed

    files = (suffixed(data, suffix) for data in arguments.data for suffix in (".bin", ".idx", ".json"))
    check_outputs([arguments.output], files)
    if arguments.part != "all":
        trained = trained_split(arguments.checkpoint)
        arguments.split = _split(arguments, trained)
    model, tokenizer = load_model(arguments.checkpoint, _vocabulary(arguments.data))
    about = {"checkpoint": str(arguments.checkpoint), "data": ", ".join(map(str, arguments.data))}
    if arguments.task == "loss":
        about |= {"part": arguments.part} | ({"split": arguments.split} if arguments.part != "all" else {})
        result = _losses(arguments, model, tokenizer)
    else:
        about["task"] = arguments.task
        result = _task(arguments, model, tokenizer)
    if arguments.output is not None:
        write_json(arguments.output, {**about, **result})
    return 0


def _losses(arguments: argparse.Namespace, model: "GPT2", tokenizer: "Tokenizer | None") -> dict[str, Any]:
    """The loss on all the data; of several, each is below `each`, too."""
    results = []
    for data in arguments.data:
        results.append(evaluate(model, _open(data, arguments, model, tokenizer)))
        print(_line(f"{data} ({arguments.part})", results[-1]))
    if len(results) == 1:
        return results[0]
    result = evaluate_all(results)
    print(_line("all", result))
    return {**result, "each": dict(zip(map(str, arguments.data), results, strict=True))}


def _task(arguments: argparse.Namespace, model: "GPT2", tokenizer: "Tokenizer | None") -> dict[str, Any]:
    """A published measure on its one file of text."""
    from training.evaluation import lambada, wikitext
    from training.inference.load import require_tokenizer

    (data,), seq_len = arguments.data, model.settings.seq_len
    tokenizer = require_tokenizer(tokenizer, arguments.checkpoint)
    if arguments.task == "lambada":
        result = lambada.last_word_accuracy(model, lambada.read_examples(data, tokenizer, seq_len))
        print(f"{data}: {lambada.line(result)}")
        return result
    stride = arguments.stride or min(32, seq_len)
    if stride > seq_len:
        raise InputError(
            f"--stride {stride} is more than the model's sequence length {seq_len}: tokens would be left out"
        )
    result = wikitext.word_perplexity(model, tokenizer, data, stride)
    print(f"{data}: {wikitext.line(result)}")
    return result


def _is_dataset(data: Path) -> bool:
    from corpus.index import suffixed

    return suffixed(data, ".idx").is_file()


def _check_data(data: Path, arguments: argparse.Namespace) -> None:
    """InputError for what cannot be evaluated, before a model is loaded."""
    task, part = arguments.task, arguments.part
    if arguments.stride and task != "wikitext":
        raise InputError("--stride is for --task wikitext")
    if task != "loss" and len(arguments.data) > 1:
        raise InputError(f"--task {task} takes one file, --data names {len(arguments.data)}")
    if task != "loss" and not is_readable(data):
        raise InputError(f"{data}: no such file; --task {task} needs one of text")
    if not _is_dataset(data) and not is_readable(data):
        raise InputError(f"{data}: neither a file nor the PREFIX of a dataset (PREFIX.bin, PREFIX.idx)")
    if not _is_dataset(data) and part != "all":
        raise InputError(f"{data}: --part {part} needs a dataset, this is one file of text")


def _split(arguments: argparse.Namespace, trained: str | None) -> str:
    """The split that defines the parts: the one that was given, or that of the training.

    Says on stderr how many documents of the part the model was trained on, where both are known and differ.
    """
    from training.dataset.corpus import Corpus, split_documents

    given: str | None = arguments.split or trained
    if given is None:
        raise InputError(
            f"{arguments.checkpoint}: does not say which documents it was trained on; for --part {arguments.part} give "
            "--split, the train.split of its training"
        )
    for data in arguments.data:
        if trained is None or arguments.part == "train":
            break
        documents = Corpus.open(data).documents
        part = split_documents(given, documents, data, "--split")[arguments.part]
        try:
            seen = split_documents(trained, documents, data)["train"]
        except ConfigError:  # a dataset that is too small for it: not the one of the training
            continue
        both = range(max(part.start, seen.start), min(part.stop, seen.stop))
        if both:
            note(
                f"{data}: with --split {given} the model was trained on {len(both)} of the {len(part)} documents of "
                f"--part {arguments.part}; its own split is {trained}"
            )
    return given


def _vocabulary(datasets: Sequence[Path]) -> int | None:
    """The vocabulary that the datasets were made with, where one says so."""
    from corpus.index import read_meta

    metas = (read_meta(data) for data in datasets if _is_dataset(data))
    return next((meta.vocab_size for meta in metas if meta is not None), None)


def _open(data: Path, arguments: argparse.Namespace, model: "GPT2", tokenizer: "Tokenizer | None") -> "Samples":
    """The samples to evaluate of one --data."""
    from training.dataset.corpus import Corpus, Samples, split_documents
    from training.inference.load import require_tokenizer

    if _is_dataset(data):
        corpus = Corpus.open(data)
        corpus.check_vocabulary(model.settings.vocab_size, f"{arguments.checkpoint}: vocab_size")
    else:
        corpus = read_text_corpus(data, require_tokenizer(tokenizer, arguments.checkpoint))
    part = range(corpus.documents)
    if arguments.part != "all":
        part = split_documents(arguments.split, corpus.documents, data, "--split")[arguments.part]
    return Samples(corpus, part, model.settings.seq_len)


def _line(name: str, result: dict[str, Any]) -> str:
    return (
        f"{name}: validation loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, "
        f"{result['tokens']:,} tokens in {result['documents']:,} documents"
    )


if __name__ == "__main__":
    sys.exit(cli.run(main))
