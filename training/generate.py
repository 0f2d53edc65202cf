"""Continue texts with a trained model.

    python -m training.generate --checkpoint results/demo/merged/tiny --prompt "The list of"
    python -m training.generate --checkpoint results/demo/models/tiny --prompt "The" --samples 3
    python -m training.generate --checkpoint results/demo/merged/tiny --prompts prompts.txt
    python -m training.generate --checkpoint results/demo/merged/tiny --prompt "Q: Who?" --json
    python -m training.generate --checkpoint results/demo/models/tiny --temperature 0
    python -m training.generate --checkpoint results/demo/merged/tiny --prompt "The" --sources

--checkpoint is a Hugging Face folder, a model folder (its newest complete checkpoint), one iter_*
folder, or MODEL/best (`train.keep_best`). --prompts is a file with one prompt per line, or, as
.jsonl, one object with a "prompt" per line; each result is that object with its "text", as a line
of JSON, which --json also gives for --prompt. Without --prompt and --prompts the command reads
prompts from the terminal, one per line, until `stop` or the end of the input.

The same seed gives the same text, whatever the other prompts are. Each typed prompt gets a new
seed, which is printed, unless --seed is given. --samples N continues each prompt N times, with the
seeds S, S + 1, …; lines of JSON then have "sample" and "seed". A text ends at end-of-text, or
before the first --stop text after the prompt. A terminal shows the text of a prompt, or the first
of its samples, as it is generated.

--sources lists the longest spans of each text, prompt excluded, that stand verbatim in the training
data, 8 tokens or more, each with its document and the first iteration that read it, and the share
of 8-grams that do. It needs the data, and the model's folder: that of the run for RUN/merged/NAME,
else MODEL. The first question about a dataset writes PREFIX.ngrams, .4 of the size of a PREFIX.bin
of 2-byte tokens.
"""

import argparse
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from common import cli
from common.console import fail, note
from common.errors import InputError
from common.files import Document, document_writer, read_lines, read_object, write_text
from common.settings import GenerateSettings
from common.settings.training import DOCUMENT_RULES

_NO_TEXT = "(no text: the model's data were made with a vocabulary that is not known)\n"

Generate = Callable[..., Iterator[tuple[str, dict[str, Any]]]]
"""(prompts, options, `Show`) -> the texts, prompt by prompt, each with its sources if requested."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    options, samples, output = _options(arguments), arguments.samples, arguments.output
    typed = arguments.prompt is None and arguments.prompts is None
    if samples > 1 and options.temperature == 0:
        raise InputError(f"--samples {samples}: with --temperature 0 all texts of a prompt are the same")
    for flag, given in (("--output", output is not None), ("--json", arguments.json)):
        if typed and given:
            raise InputError(f"{flag} needs --prompt or --prompts: typed prompts are answered on the terminal")
    records = [{"prompt": arguments.prompt}]
    if arguments.prompts is not None:
        records = read_prompts(arguments.prompts)
    texts = _load(arguments)
    if texts is None:
        print(_NO_TEXT, end="")
        if output is not None:
            write_text(output, _NO_TEXT)
    elif typed:
        _answer_typed(texts, options, samples, new_seeds=arguments.seed is None)
    elif arguments.json or arguments.prompts is not None:
        _answer_records(texts, records, options, samples, output)
    else:
        _answer_prompt(texts, arguments.prompt, options, samples, output)
    return 0


def _parser() -> argparse.ArgumentParser:
    defaults = GenerateSettings()
    parser = cli.parser("training.generate", __doc__)
    add = parser.add_argument
    add("--checkpoint", type=cli.checkpoint_path, required=True, metavar="FOLDER", help="model to use")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="text to continue; leave out to type prompts")
    source.add_argument(
        "--prompts", type=cli.input_path, metavar="FILE", help="texts to continue, one per line; - for stdin"
    )
    add("--max-tokens", type=int, default=defaults.max_tokens, metavar="N")
    add("--temperature", type=float, default=defaults.temperature, metavar="T", help="0 is greedy")
    add("--top-k", type=int, default=defaults.top_k, metavar="K", help="0 for all")
    add("--top-p", type=float, default=defaults.top_p, metavar="P")
    lower = "above 1: lower the logits of tokens that are in the text already"
    add("--repetition-penalty", type=float, default=defaults.repetition_penalty, metavar="R", help=lower)
    ends = "end a text before the first TEXT after the prompt; repeat it for several"
    add("--stop", action="append", default=[], metavar="TEXT", help=ends)
    add("--seed", type=int, metavar="S", help=f"default {defaults.seed}; for typed prompts a new one each")
    add("--samples", type=cli.positive_int, default=1, metavar="N", help="texts per prompt")
    add("--json", action="store_true", help="print a line of JSON per text")
    add("--output", type=cli.output_file, metavar="FILE", help="also write the results to a file")
    shown = "show what stands verbatim in the training data of the model, or of MODEL"
    add("--sources", type=cli.input_path, nargs="?", const=Path(), metavar="MODEL", help=shown)
    missing = "print a line instead of failing if the model has none"
    add("--allow-no-tokenizer", action="store_true", help=missing)
    return parser


def _options(arguments: argparse.Namespace) -> GenerateSettings:
    from pydantic import ValidationError

    names = ("max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop", "seed")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    try:
        return GenerateSettings.model_validate(given)
    except ValidationError as errors:
        error = errors.errors()[0]
        flag = "--" + str(error["loc"][0]).replace("_", "-")
        raise InputError(f"{flag} {error['input']}: {error['msg']}") from None


def _load(arguments: argparse.Namespace) -> Generate | None:
    """Load the model; None if it has no tokenizer and --allow-no-tokenizer is given."""
    from training.inference.load import load_model, origin_of, require_tokenizer
    from training.inference.sampling import generate

    checkpoint, samples, sources = arguments.checkpoint, arguments.samples, None
    if arguments.sources is not None:  # before the model is loaded: both take memory
        from training.sources import open_sources

        sources = open_sources(checkpoint, arguments.sources)
    model, known = load_model(checkpoint)
    if known is None and arguments.allow_no_tokenizer:
        return None
    tokenizer, origin = require_tokenizer(known, checkpoint), origin_of(checkpoint)
    needs_prompt = all(getattr(origin, rule) for rule in DOCUMENT_RULES)

    def texts(
        prompts: Sequence[str], options: GenerateSettings, show: Callable[[str], None] | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        if needs_prompt and not all(prompts):
            note("without a prompt a text begins after end-of-text, which eod_mask_loss kept from being learnt")
        begins = (prompt for prompt in prompts for _ in range(samples))
        pairs = zip(generate(model, tokenizer, prompts, options, samples, show), begins, strict=True)
        return ((text, sources.of(text.removeprefix(prompt)) if sources else {}) for text, prompt in pairs)

    return texts


# ------------------------------------------------------------------- one function per mode


def _answer_records(
    texts: Generate, records: Sequence[Document], options: GenerateSettings, samples: int, output: Path | None
) -> None:
    """Print each record with its text, and write it to `output`."""
    from training.inference.sampling import sample_seed

    numbered = ((record, sample) for record in records for sample in range(samples))
    answers = texts([record["prompt"] for record in records], options)
    with document_writer(output) as write:
        for (record, sample), (text, sources) in zip(numbered, answers, strict=True):
            number = {"sample": sample + 1, "seed": sample_seed(options, sample)} if samples > 1 else {}
            result = {**record, **number, "text": text, **sources}
            print(orjson.dumps(result).decode(), flush=True)
            write(result)


def _answer_typed(texts: Generate, options: GenerateSettings, samples: int, *, new_seeds: bool) -> None:
    """Answer prompts from stdin until `stop` or its end; `new_seeds`: print a new seed for each."""
    while True:
        print("prompt> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "stop":
            return
        if new_seeds:
            options = options.model_copy(update={"seed": secrets.randbelow(2**32)})
        try:
            _answer_prompt(texts, line.rstrip("\n"), options, samples)
            if new_seeds:
                print(f"(seed {options.seed})", flush=True)
        except InputError as error:  # the next prompt may be fine
            fail(error)


def _answer_prompt(
    texts: Generate, prompt: str, options: GenerateSettings, samples: int, output: Path | None = None
) -> None:
    """Print the texts of one prompt, each above its sources, and write all of it to `output`.

    Several have a line above each with its number and seed. On a terminal the first is streamed.
    """
    from training.inference.sampling import sample_seed

    printed: list[str] = []
    shown = 0  # characters of the text

    def write(piece: str) -> None:
        printed.append(piece)
        print(piece, end="", flush=True)

    def show(text: str) -> None:
        nonlocal shown
        write(text[shown:])
        shown = len(text)

    answers = texts([prompt], options, show if sys.stdout.isatty() else None)
    for sample in range(samples):
        if samples > 1:
            write(f"--- sample {sample + 1}, seed {sample_seed(options, sample)}\n")
        text, sources = next(answers)
        write("\n".join([text[shown:], *source_lines(sources), ""]))
        shown = 0
    if output is not None:
        write_text(output, "".join(printed))


def source_lines(sources: dict[str, Any]) -> list[str]:
    """The result of `Sources.of` as lines: the share of 8-grams, then the spans; none if empty."""
    if not sources:
        return []
    grams, verbatim = sources["eight_grams"], sources["verbatim"]
    share = f"{verbatim:,} of {grams:,} 8-grams stand in the training data ({verbatim / max(1, grams):.1%})"
    lines = [f"--- sources: {share}"]
    for span in sources["sources"]:
        read = f"first read in iteration {span['iteration']:,}" if span["iteration"] else "not read yet"
        if 0 < span["tokens_read"] < span["tokens"]:
            read += f" ({span['tokens_read']} of its tokens)"
        if span["part"] != "train":
            read = f"never read ({span['part']} part)"
        place = span["url"] or f"document {span['number']:,} of {span['dataset']}"
        more = f" (first of {span['places']:,} places)" if span["places"] > 1 else ""
        lines.append(f"{span['tokens']} tokens {span['text']!r}: {place}{more}, {read}")
    return lines


def read_prompts(path: Path) -> list[Document]:
    """The prompts in a file, `{"prompt": text}`: objects of a .jsonl file, or lines of any other.

    Raises InputError if the file is empty or a line is not a prompt.
    """
    records = []
    for number, line in enumerate(read_lines(path), start=1):
        where, is_json = f"{path}:{number}", ".jsonl" in path.suffixes
        try:
            record = read_object(line, where, ["prompt"]) if is_json else {"prompt": line.decode()}
        except UnicodeDecodeError as error:
            record = str(error)
        if isinstance(record, str):
            raise InputError(f"{where}: {record}")
        records.append(record)
    if not records:
        raise InputError(f"{path}: no prompts; write one per line")
    return records


if __name__ == "__main__":
    sys.exit(cli.run(main))
