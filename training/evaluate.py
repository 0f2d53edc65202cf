"""Loss and perplexity of a model on a dataset or on text.

    python -m training.evaluate --checkpoint results/demo/models/tiny --data results/demo/dataset/corpus_text_document
    python -m training.evaluate --checkpoint merged/tiny --data book.txt poems.jsonl --output books.json

--checkpoint is a Hugging Face folder, a training run (its newest checkpoint) or one iter_* folder. --data is a PREFIX
of .bin/.idx, a .jsonl file of documents (.zst, .gz, … too), or any other file, read as one text. The tokens are
cut into windows of the model's sequence length that do not overlap; every token but the first is predicted once. Of
several datasets each has its line, and the loss of all is the mean over their tokens.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import cli
from common.errors import InputError
from common.files import read_documents, read_lines, write_json

if TYPE_CHECKING:
    from common.tokenizer import Tokenizer
    from training.data import Corpus, Samples
    from training.model import GPT2

_BATCH = 8  # windows in one forward pass


def read_text_corpus(path: Path, tokenizer: "Tokenizer") -> "Corpus":
    """The documents of a text or JSON-lines file, each followed by end-of-text, as a corpus in memory."""
    import numpy as np

    from training.data import Corpus

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

    from training.model import summed_loss
    from training.precision import autocast
    from training.validation import sum_of_losses

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
    loss = total / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"loss": loss, "perplexity": perplexity, "tokens": tokens, "documents": documents}


def evaluate_all(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result of several datasets together, each token weighing the same."""
    total = sum(result["loss"] * result["tokens"] for result in results)
    return _result(total, sum(result["tokens"] for result in results), sum(result["documents"] for result in results))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.evaluate", __doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="model to evaluate")
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE|PREFIX", help="texts or datasets")
    parser.add_argument("--part", choices=("all", "train", "valid", "test"), default="all", help="part of a dataset")
    parser.add_argument("--split", default="949,50,1", metavar="A,B,C", help="shares that define the parts")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the result as JSON too")
    arguments = parser.parse_args(argv)

    from training.load import load_model

    for data in arguments.data:
        _check_data(data, arguments.part)
    model, tokenizer = load_model(arguments.checkpoint)
    results = []
    for data in arguments.data:
        samples = _open(data, arguments, model, tokenizer)
        results.append(evaluate(model, samples))
        print(_line(f"{data} ({arguments.part})", results[-1]))
    result = evaluate_all(results)
    if len(results) > 1:
        print(_line("all", result))
    if arguments.output is not None:
        names = [str(data) for data in arguments.data]
        about = {"checkpoint": str(arguments.checkpoint), "data": ", ".join(names), "part": arguments.part}
        each = {"each": dict(zip(names, results, strict=True))} if len(results) > 1 else {}
        write_json(arguments.output, {**about, **result, **each})
    return 0


def _is_dataset(data: Path) -> bool:
    from corpus.index import suffixed

    return suffixed(data, ".idx").is_file()


def _check_data(data: Path, part: str) -> None:
    """InputError for what cannot be evaluated, before a model is loaded."""
    if not _is_dataset(data) and not data.is_file():
        raise InputError(f"{data}: neither a file nor the PREFIX of a dataset (PREFIX.bin, PREFIX.idx)")
    if not _is_dataset(data) and part != "all":
        raise InputError(f"{data}: --part {part} needs a dataset, this is one file of text")


def _open(data: Path, arguments: argparse.Namespace, model: "GPT2", tokenizer: "Tokenizer | None") -> "Samples":
    """The samples to evaluate of one --data."""
    from training.data import Corpus, Samples, split_documents
    from training.load import require_tokenizer

    if _is_dataset(data):
        corpus = Corpus.open(data)
        corpus.check_vocabulary(model.settings.vocab_size, f"{arguments.checkpoint}: vocab_size")
    else:
        corpus = read_text_corpus(data, require_tokenizer(tokenizer, arguments.checkpoint))
    part = range(corpus.documents)
    if arguments.part != "all":
        part = split_documents(arguments.split, corpus.documents, data)[arguments.part]
    return Samples(corpus, part, model.settings.seq_len)


def _line(name: str, result: dict[str, Any]) -> str:
    return (
        f"{name}: validation loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, "
        f"{result['tokens']:,} tokens in {result['documents']:,} documents"
    )


if __name__ == "__main__":
    sys.exit(cli.run(main))
