"""Show which documents a training iteration read, or which iterations read a document.

    python -m workflow.provenance.trace --model results/demo/models/tiny --iteration 12 --text
    python -m workflow.provenance.trace --model results/demo/models/tiny --iteration 12 --sample 3
    python -m workflow.provenance.trace --model results/demo/models/tiny --url https://corner.example/archiv-bei-nacht
    python -m workflow.provenance.trace --model results/demo/models/tiny --domain corner.example
    python -m workflow.provenance.trace --model results/demo/models/tiny --ids ids.txt --json

--model is a model folder. Its data must lie where its settings.yaml says, or be named with --data,
in the order of the settings. A sample is seq_len + 1 tokens of the training part: the token at a
border belongs to two. The first question about an epoch writes its order to MODEL/trace, 16 bytes
per document and 8 per sample; later ones read it.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import orjson

from common import cli
from common.errors import InputError
from common.files import read_lines
from corpus.index.documents import REMOVED
from training.trace import Trace

_SHOWN = 20  # documents or iterations listed for people


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
    """One line per document: the iterations that read it; then a summary."""
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
    parser = cli.parser("workflow.provenance.trace", __doc__)
    parser.add_argument("--model", type=cli.input_path, required=True, metavar="FOLDER", help="model folder")
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="PREFIX", help="datasets, if they moved")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--iteration", type=cli.positive_int, metavar="N", help="what this iteration read")
    wanted.add_argument("--url", metavar="U", help="what read the document of this URL")
    wanted.add_argument("--domain", metavar="D", help="what read documents of this host and its subdomains")
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
        raise InputError(f"{what}: no document of {', '.join(map(str, trace.prefixes))}; see workflow.provenance.show")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
