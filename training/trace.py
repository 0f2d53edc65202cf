"""Which documents an iteration of a training read, and which iterations read a document.

    python -m training.trace --model results/demo/models/tiny --iteration 12
    python -m training.trace --model results/demo/models/tiny --iteration 12 --sample 3 --text
    python -m training.trace --model results/demo/models/tiny --url https://corner.example/archiv-bei-nacht
    python -m training.trace --model results/demo/models/tiny --domain corner.example
    python -m training.trace --model results/demo/models/tiny --ids ids.txt --json

--model is a model folder; its data must still be where its settings.yaml says, or be named with --data, in the order of
the settings. A sample is seq_len + 1 tokens of the training part: the token at a border stands in two. The first
question about an epoch writes its order to MODEL/trace, 16 bytes per document and 8 per sample; later ones read it.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from common import cli
from common.config import load_settings
from common.errors import InputError
from common.files import read_json, read_lines, read_rows, short_hash
from common.tokenizer import Tokenizer, vocabulary_files
from corpus.index import suffixed
from corpus.index.documents import REMOVED, DocumentTable, Row
from training.dataset.blend import Blend
from training.dataset.corpus import Corpus, Samples, Span, split_documents
from training.dataset.order import Order, read_order, write_order
from training.model_folder import checkpoint_folders, iteration_of

_SHOWN = 20  # documents or iterations listed for people
_TAIL = 1 << 14  # bytes at the end of train.csv that hold its last row


@dataclass(frozen=True)
class Piece:
    """Tokens of one document in one sample of a step."""

    sample: int
    """Number of the sample in its global batch."""
    dataset: Path
    document: Row
    span: Span


class Reads(NamedTuple):
    """Every reading of some documents of one dataset, in the order of training: one entry per document and sample."""

    documents: npt.NDArray[np.int64]
    iterations: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]


class Trace:
    """What a model was trained on, step by step. `data` names its datasets where they are not where they were.

    Raises InputError if the folder is not a model's, or its data are gone or were made again.
    """

    def __init__(self, folder: Path, data: Sequence[Path] = ()) -> None:
        path = folder / "settings.yaml"
        if not path.is_file():
            raise InputError(f"{path}: no such file; name the folder of a model that has been trained")
        self.folder, self.settings = folder, load_settings(path)
        self.train = self.settings.experiment(folder.name).train
        self.seq_len = self.settings.experiment(folder.name).model.seq_len
        datasets = self.settings.datasets(folder.name)
        if data and len(data) != len(datasets):
            raise InputError(f"--data names {len(data)} datasets; {path} has {len(datasets)}")
        self.prefixes = list(data) or [self._found(source.prefix) for source in datasets]
        self.blend = Blend((), [source.weight for source in datasets])  # only the order: no dataset is opened
        points = _points(folder)
        self._iterations, self._consumed = list(points), list(points.values())
        self.trained = max([_last_row(folder), *map(iteration_of, checkpoint_folders(folder)[:1])])
        self.consumed = self.consumed_after(self.trained)
        self._orders: dict[tuple[int, int], Order] = {}

    def _found(self, prefix: Path) -> Path:
        """A dataset of the model's own run, which may have been moved, lies where RUN/models/NAME says."""
        run = self.settings.run
        if self.folder.parent.name == "models" and prefix.is_relative_to(run):
            return self.folder.parent.parent / prefix.relative_to(run)
        return prefix

    def _batch(self, stretch: int) -> int:
        """Samples per iteration after a point of `_points`."""
        if stretch + 1 == len(self._iterations):
            return self.train.global_batch_size
        samples = self._consumed[stretch + 1] - self._consumed[stretch]
        size, rest = divmod(samples, self._iterations[stretch + 1] - self._iterations[stretch])
        if rest:
            raise InputError(
                f"{self.folder}: the batch size changed between iterations {self._iterations[stretch]} and "
                f"{self._iterations[stretch + 1]}, and starts.csv does not say where"
            )
        return size

    def consumed_after(self, iteration: int) -> int:
        """Samples consumed by the iterations up to this one."""
        stretch = bisect_right(self._iterations, iteration) - 1
        return self._consumed[stretch] + (iteration - self._iterations[stretch]) * self._batch(stretch)

    def iterations_of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The iterations that consumed these samples."""
        stretches = np.searchsorted(self._consumed, numbers, side="right") - 1
        found = np.empty(len(numbers), np.int64)
        for stretch in np.unique(stretches).tolist():
            here = stretches == stretch
            steps = (numbers[here] - self._consumed[stretch]) // self._batch(stretch)
            found[here] = self._iterations[stretch] + steps + 1
        return found

    @cached_property
    def tables(self) -> list[DocumentTable]:
        """The documents of each dataset."""
        return [DocumentTable(prefix) for prefix in self.prefixes]

    @cached_property
    def samples(self) -> list[Samples]:
        """The training part of each dataset, opened and compared with what the newest checkpoint was trained on.

        Only by the documents' lengths: those that `corpus.remove` has removed keep their places.
        """
        parts = []
        for prefix in self.prefixes:
            corpus = Corpus.open(prefix)
            documents = split_documents(self.train.split, corpus.documents, prefix)["train"]
            parts.append(Samples(corpus, documents, self.seq_len, self.train.seed))
        for folder in checkpoint_folders(self.folder)[:1]:
            if read_json(folder / "manifest.json")["data"] != Blend(parts, self.blend.weights).identity:
                where = " and ".join(map(str, self.prefixes))
                raise InputError(
                    f"{folder}: was trained on other data than {where} holds now; restore them (training.trace takes "
                    f"--data, if they moved), or move {self.folder} out of its run"
                )
        return parts

    def order(self, corpus: int, epoch: int) -> Order:
        """The order of an epoch of a dataset, from MODEL/trace; made if it is not there."""
        if (corpus, epoch) not in self._orders:
            index = suffixed(self.prefixes[corpus], ".idx")
            if not index.is_file():
                raise InputError(f"{index}: no such file; put it back (training.trace takes --data, if it moved)")
            stat = index.stat()
            fixed = (index.resolve(), stat.st_size, stat.st_mtime_ns, self.train.split, self.train.seed, self.seq_len)
            key = short_hash(repr(fixed))
            path = self.folder / "trace" / f"{corpus}-{epoch}.order"
            found = read_order(path, key)
            if found is None:
                path.parent.mkdir(exist_ok=True)
                write_order(path, key, self.samples[corpus].make_epoch(epoch))
                found = read_order(path, key)
                assert found is not None
            self._orders[corpus, epoch] = found
        return self._orders[corpus, epoch]

    def step(self, iteration: int) -> Iterator[Piece]:
        """What an iteration read, in the order of its samples. Raises InputError if it has not been trained."""
        if not 1 <= iteration <= self.trained:
            raise InputError(f"--iteration {iteration}: {self.folder} has iterations 1 to {self.trained}")
        first = self.consumed_after(iteration - 1)
        for number in range(first, self.consumed_after(iteration)):
            corpus, index = self.blend.find(number)
            epoch, place = divmod(index, len(self.order(corpus, 0).epoch.samples))
            for span in self.order(corpus, epoch).epoch.cut(place, self.seq_len):
                yield Piece(number - first, self.prefixes[corpus], self.tables[corpus][span.document], span)

    def reads(self, corpus: int, documents: Sequence[int]) -> Reads:
        """Every reading of documents of a dataset."""
        parts = [Reads(*np.empty((3, 0), np.int64)), *self._reads(corpus, documents, self.consumed)]
        return Reads(*map(np.concatenate, zip(*parts, strict=True)))

    def _reads(
        self, corpus: int, documents: Sequence[int], consumed: int, within: slice = slice(None)
    ) -> Iterator[Reads]:
        """The readings of each epoch among the first `consumed` samples; with `within`, of these tokens."""
        taken = self.blend.taken(consumed, corpus)
        first = self.order(corpus, 0).epoch
        wanted = np.array([number for number in documents if number < len(first.documents)], np.int64)
        for epoch in range(-(-taken // len(first.samples)) if len(wanted) else 0):
            held = self.order(corpus, epoch).samples_of(wanted, self.seq_len, within)
            index = held.place + epoch * len(first.samples)
            seen = index < taken
            numbers = self.blend.numbers(corpus, index[seen])
            order = np.lexsort((held.document[seen], numbers))
            read = (held.document[seen], self.iterations_of(numbers), held.tokens[seen])
            yield Reads(*(column[order] for column in read))

    def first_read(self, corpus: int, span: Span, last: int) -> tuple[int, int]:
        """The first iteration up to `last` with a sample that holds a whole span of a dataset, and the span's tokens.

        If borders of samples cut it in every epoch: the first that read a part, and how much of it. 0, 0: none did.
        """
        within, some = slice(span.first, span.first + span.tokens), (0, 0)
        for reads in self._reads(corpus, [span.document], self.consumed_after(last), within):
            found = list(zip(reads.iterations.tolist(), reads.tokens.tolist(), strict=True))
            for read in found:
                if read[1] == span.tokens:
                    return read
            some = some if some[0] or not found else found[0]
        return some

    def text(self, piece: Piece) -> str:
        """The text of a piece."""
        corpus = self.samples[self.prefixes.index(piece.dataset)].corpus
        start = int(corpus.starts[piece.span.document]) + piece.span.first
        return self.tokenizer.decode(corpus.tokens[start : start + piece.span.tokens].tolist())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """That of its data."""
        own = [self.folder / "tokenizer" / name for name in ("encoder.json", "vocab.bpe")]
        tokenize = self.settings.tokenize
        files = own if all(map(Path.is_file, own)) else [tokenize.encoder_json, tokenize.vocab_bpe]
        return Tokenizer(vocabulary_files(*files))

    def checkpoint_before(self, iteration: int) -> Path | None:
        """The newest checkpoint of a smaller iteration."""
        return next((path for path in checkpoint_folders(self.folder) if iteration_of(path) < iteration), None)


def _points(folder: Path) -> dict[int, int]:
    """Samples consumed after iterations between which the batch size is constant.

    Of every start; before starts.csv recorded them, of every row of train.csv.
    """
    starts = read_rows(folder / "starts.csv")
    whole = all(row.get("consumed_samples") for row in starts)
    rows = starts if whole else [*starts, *read_rows(folder / "train.csv")]
    known = {int(row["iteration"]): int(row["consumed_samples"]) for row in rows if row.get("consumed_samples")}
    return dict(sorted(({0: 0} | known).items()))


def _last_row(folder: Path) -> int:
    """The iteration of the last row of train.csv; 0 if there is none."""
    path = folder / "train.csv"
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().rpartition(b"\n")[0].splitlines()
    last = lines[-1].partition(b",")[0] if lines else b""
    return int(last) if last.isdigit() else 0


def _show_step(trace: Trace, iteration: int, sample: int | None, *, text: bool, as_json: bool) -> Iterator[str]:
    for piece in trace.step(iteration):
        if sample not in (None, piece.sample):
            continue
        shard = f"shard {piece.document.shard}"
        row = {
            "sample": piece.sample, "dataset": str(piece.dataset), **piece.document._asdict(),
            "first": piece.span.first, "tokens": piece.span.tokens,
        }  # fmt: skip
        if text:
            row["text"] = trace.text(piece)
        if as_json:
            yield orjson.dumps(row).decode()
            continue
        end = piece.span.first + piece.span.tokens - 1
        place = f"tokens {piece.span.first:,} to {end:,} of document {piece.document.number:,}"
        source = piece.document.url or ("removed" if piece.document.id == REMOVED else "no URL")
        yield f"sample {piece.sample:<4} {piece.document.id}  {place}  {source}  {piece.document.origin or shard}"
        if text:
            yield f"    {row['text']!r}"


def _show_reads(trace: Trace, corpus: int, documents: Sequence[int], *, as_json: bool) -> Iterator[str]:
    """Lines about documents of a dataset: what read each, and all of them."""
    reads, table = trace.reads(corpus, documents), trace.tables[corpus]
    shown = documents if as_json else documents[:_SHOWN]
    for number in shown:
        own, row = reads.documents == number, table[number]
        iterations, tokens = np.unique(reads.iterations[own]).tolist(), int(reads.tokens[own].sum())
        if as_json:
            fields = {**row._asdict(), "dataset": str(trace.prefixes[corpus]), "iterations": iterations}
            before = str(trace.checkpoint_before(iterations[0]) or "") if iterations else ""
            yield orjson.dumps({**fields, "tokens": tokens, "checkpoint_before": before}).decode()
        else:
            yield f"{row.id}  {row.url or row.origin or 'no URL'}: {_reading(iterations, tokens)}"
    if not as_json:
        if len(documents) > _SHOWN:
            yield f"… and {len(documents) - _SHOWN:,} more documents (--json lists all)"
        every = np.unique(reads.iterations).tolist()
        yield f"{len(documents):,} of {trace.prefixes[corpus]}: {_reading(every, int(reads.tokens.sum()))}"
        if every:
            newest = trace.checkpoint_before(every[0])
            yield f"newest checkpoint before the first read: {newest.name if newest else 'none'}"


def _reading(iterations: Sequence[int], tokens: int) -> str:
    if not iterations:
        return "never read"
    listed = ", ".join(f"{iteration:,}" for iteration in iterations[:_SHOWN])
    more = f", … ({len(iterations) - _SHOWN:,} more)" if len(iterations) > _SHOWN else ""
    times = f"{len(iterations):,} iteration{'s' if len(iterations) > 1 else ''}"
    return f"{tokens:,} tokens in {times}: {listed}{more}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.trace", __doc__)
    parser.add_argument("--model", type=cli.input_path, required=True, metavar="FOLDER", help="model folder")
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="PREFIX", help="datasets, if they moved")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--iteration", type=cli.positive_int, metavar="N", help="what this iteration read")
    wanted.add_argument("--url", metavar="U", help="what read the document of this URL")
    wanted.add_argument("--domain", metavar="D", help="what read documents of this host and those below it")
    wanted.add_argument("--ids", type=cli.input_path, metavar="FILE", help="what read these documents, one id per line")
    parser.add_argument("--sample", type=int, metavar="I", help="only this sample of the iteration, from 0")
    parser.add_argument("--text", action="store_true", help="with the text of each piece of the iteration")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each piece or document")
    arguments = parser.parse_args(argv)
    trace = Trace(arguments.model, arguments.data)
    if arguments.iteration is not None:
        pieces = _show_step(trace, arguments.iteration, arguments.sample, text=arguments.text, as_json=arguments.json)
        lines = list(pieces)
        if not lines:
            raise InputError(f"--sample {arguments.sample}: iteration {arguments.iteration} has no such sample")
        print("\n".join(lines))
        return 0
    if arguments.sample is not None or arguments.text:
        parser.error("--sample and --text are for --iteration")
    ids = [line.decode("ascii", "replace") for line in read_lines(arguments.ids)] if arguments.ids else []
    some = False
    for corpus, table in enumerate(trace.tables):
        if arguments.url:
            documents = table.of_url(arguments.url)
        else:
            documents = table.of_domain(arguments.domain) if arguments.domain else table.of_ids(ids)
        some = some or bool(documents)
        for line in _show_reads(trace, corpus, documents, as_json=arguments.json) if documents else ():
            print(line)
    if not some:
        what = arguments.url or arguments.domain or arguments.ids
        raise InputError(f"{what}: no document of {' and '.join(map(str, trace.prefixes))}; corpus.show tells why")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
