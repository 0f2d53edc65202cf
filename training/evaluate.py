"""Loss and perplexity of a model on a dataset or on text.

    python -m training.evaluate --checkpoint results/demo/models/tiny --data results/demo/dataset/corpus_text_document
    python -m training.evaluate --checkpoint merged/tiny --data book.txt --output book.json

--checkpoint is a Hugging Face folder, a training run (its newest checkpoint) or one iter_* folder. --data is a PREFIX
of .bin/.idx, a .jsonl file of documents (.zst, .gz, … too), or any other file, read as one text. The tokens are
cut into windows of the model's sequence length that do not overlap; every token but the first is predicted once.
"""

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

    from training.model import next_token_loss
    from training.validation import autocast, mean_loss

    tail = samples.tail()
    predicted = samples.per_epoch * samples.seq_len
    total = mean_loss(model, samples, samples.per_epoch, _BATCH, "auto") * predicted if predicted else 0.0
    if len(tail) > 1:
        device = next(model.parameters()).device
        tokens = torch.from_numpy(tail).to(device)[None]
        with torch.no_grad(), autocast("auto", device):
            total += float(next_token_loss(model.eval()(tokens[:, :-1]), tokens[:, 1:])) * (len(tail) - 1)
        predicted += len(tail) - 1
    if not predicted:
        raise InputError(f"{samples.corpus.prefix}: fewer than two tokens to evaluate; choose another file or part")
    loss = total / predicted
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"loss": loss, "perplexity": perplexity, "tokens": predicted, "documents": samples.documents}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.evaluate", __doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="model to evaluate")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE|PREFIX", help="text or dataset")
    parser.add_argument("--part", choices=("all", "train", "valid", "test"), default="all", help="part of a dataset")
    parser.add_argument("--split", default="949,50,1", metavar="A,B,C", help="shares that define the parts")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the result as JSON too")
    arguments = parser.parse_args(argv)

    from training.data import Corpus, Samples, split_documents
    from training.load import load_model, require_tokenizer

    is_dataset = arguments.data.with_name(arguments.data.name + ".idx").is_file()
    if not is_dataset and not arguments.data.is_file():
        raise InputError(f"{arguments.data}: neither a file nor the PREFIX of a dataset (PREFIX.bin, PREFIX.idx)")
    if not is_dataset and arguments.part != "all":
        raise InputError(f"{arguments.data}: --part {arguments.part} needs a dataset, this is one file of text")
    model, tokenizer = load_model(arguments.checkpoint)
    if is_dataset:
        corpus = Corpus.open(arguments.data)
        corpus.check_vocabulary(model.settings.vocab_size, f"{arguments.checkpoint}: vocab_size")
    else:
        corpus = read_text_corpus(arguments.data, require_tokenizer(tokenizer, arguments.checkpoint))
    part = range(corpus.documents)
    if arguments.part != "all":
        part = split_documents(arguments.split, corpus.documents)[arguments.part]
    result = evaluate(model, Samples(corpus, part, model.settings.seq_len))
    print(
        f"{arguments.data} ({arguments.part}): validation loss {result['loss']:.4f}, "
        f"perplexity {result['perplexity']:.2f}, {result['tokens']:,} tokens in {result['documents']:,} documents"
    )
    if arguments.output is not None:
        about = {"checkpoint": str(arguments.checkpoint), "data": str(arguments.data), "part": arguments.part}
        write_json(arguments.output, {**about, **result})
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
