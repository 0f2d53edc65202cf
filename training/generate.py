"""Continue texts.

    python -m training.generate --checkpoint merged/tiny --prompt "The list of" --max-tokens 64
    python -m training.generate --checkpoint merged/tiny --prompts prompts.txt --output continued.jsonl
    python -m training.generate --checkpoint merged/tiny --prompt "The list of" --samples 3
    python -m training.generate --checkpoint results/demo/models/tiny --temperature 0

--checkpoint is a Hugging Face folder, a training run (its newest checkpoint) or one iter_* folder. --prompts has one
prompt a line, or, as .jsonl, one object with a "prompt" a line; each result is that object with its "text", a line of
JSON. Without either it reads prompts from the terminal, a line each, until `stop` or the end. The same seed gives the
same text, whatever other prompts there are; typed prompts get a fresh seed each, which is printed, unless --seed is
given. --samples N continues each prompt N times, with the seeds S, S + 1, …; lines of JSON say which "sample" and
"seed". A text ends early at end-of-text.
"""

import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from common import cli
from common.errors import InputError
from common.files import Document, optional_writer, read_lines, write_text
from common.settings import GenerateSettings
from common.workers import batched

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from common.tokenizer import Tokenizer
    from training.model import GPT2

_SEEDS = 2**64
_NO_TEXT = "(no text: the model's data were made with a vocabulary that is not known)"
_BATCH = 8  # texts at a time; at 124M a text of 1,024 tokens keeps 75 MB of keys and values


def choose(logits: "Tensor", options: GenerateSettings, generator: "Generator") -> int:
    """One token id from logits (V,): greedy at temperature 0, else drawn from the top k and the top p."""
    import torch

    if options.temperature == 0:
        return int(logits.argmax())
    ids = torch.arange(len(logits))
    if options.top_k:  # a sort of all costs more than choosing those to sort; equals of the k-th go by their order
        ids = (logits >= logits.topk(min(options.top_k, len(logits))).values[-1]).nonzero()[:, 0]
    ordered, order = logits[ids].double().sort(descending=True, stable=True)
    ordered = (ordered - ordered[0]) / options.temperature  # however low the temperature: 0 and less
    if options.top_k:
        ordered, order = ordered[: options.top_k], order[: options.top_k]
    probabilities = ordered.softmax(dim=0)
    before = probabilities.cumsum(dim=0) - probabilities  # probability of everything likelier
    probabilities[before >= options.top_p] = 0.0  # never the likeliest, which has nothing before it
    return int(ids[order[torch.multinomial(probabilities, 1, generator=generator)]])


def continue_tokens(
    model: "GPT2",
    prompts: Sequence[Sequence[int]],
    options: GenerateSettings,
    end_of_text: int,
    seeds: Sequence[int] | None = None,
) -> list[list[int]]:
    """The tokens behind each prompt, at most `max_tokens`, in one batch; ids above `end_of_text` are never chosen.

    An end-of-text stands before each prompt: a text stands behind the end of the one before. Each text has the random
    numbers that it would have alone: those of its own seed, or of `options.seed`.
    """
    import torch

    from training.inference.kv_cache import kv_cache

    texts = [[end_of_text, *prompt] for prompt in prompts]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or [options.seed] * len(prompts)]
    growing = list(range(len(prompts)))
    with kv_cache(model, len(prompts), max(map(len, texts)) + options.max_tokens) as next_logits:
        for _ in range(options.max_tokens):
            logits = next_logits(texts).cpu()
            tokens = {row: choose(logits[row, : end_of_text + 1], options, generators[row]) for row in growing}
            growing = [row for row in growing if tokens[row] != end_of_text]
            if not growing:
                break
            for row in growing:
                texts[row].append(tokens[row])
    return [text[1 + len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def seed_of(options: GenerateSettings, sample: int) -> int:
    """The seed of the `sample`-th text of a prompt, from 0."""
    return (options.seed + sample) % _SEEDS


def generate(
    model: "GPT2", tokenizer: "Tokenizer", prompts: Sequence[str], options: GenerateSettings, samples: int = 1
) -> Iterator[str]:
    """Each prompt and its continuation, at most `max_tokens` tokens more, in the order of the prompts.

    Of several samples those of a prompt follow each other.

    Raises InputError, before anything is computed, for a prompt that the model's context cannot hold.
    """
    encoded = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    room = model.settings.seq_len - 1  # an end-of-text stands before it
    for number, tokens in enumerate(encoded, start=1):
        if len(tokens) > room:
            raise InputError(f"prompt {number}: {len(tokens):,} tokens, the model has room for {room:,}; shorten it")
    wanted = [(tokens, seed_of(options, sample)) for tokens in encoded for sample in range(samples)]
    return (
        tokenizer.decode(prompt + more)
        for batch in batched(wanted, _BATCH)
        for prompt, more in zip(
            (prompt for prompt, _ in batch),
            continue_tokens(
                model,
                [prompt for prompt, _ in batch],
                options,
                tokenizer.end_of_text,
                [seed for _, seed in batch],
            ),
            strict=True,
        )
    )


def read_prompts(path: Path) -> list[Document]:
    """Objects with a string under "prompt": the lines of a .jsonl file, or made of the lines of any other.

    Raises InputError for a file without a line, or with one that is no prompt.
    """
    records = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            record = orjson.loads(line) if ".jsonl" in path.suffixes else {"prompt": line.decode()}
        except ValueError as error:  # of JSON, or of UTF-8
            raise InputError(f"{path}:{number}: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise InputError(f"{path}:{number}: not a JSON object with a string under 'prompt'")
        records.append(record)
    if not records:
        raise InputError(f"{path}: no prompts; write one a line")
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    defaults = GenerateSettings()
    parser = cli.parser("training.generate", __doc__)
    parser.add_argument("--checkpoint", type=cli.input_path, required=True, metavar="DIR", help="model to use")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="text to continue; leave out to type prompts")
    source.add_argument(
        "--prompts", type=cli.input_path, metavar="FILE", help="texts to continue, a line each; - for stdin"
    )
    parser.add_argument("--max-tokens", type=int, default=defaults.max_tokens, metavar="N")
    parser.add_argument("--temperature", type=float, default=defaults.temperature, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=defaults.top_k, metavar="K", help="0 for all")
    parser.add_argument("--top-p", type=float, default=defaults.top_p, metavar="P")
    parser.add_argument(
        "--seed", type=int, metavar="S", help=f"default {defaults.seed}; typed prompts: a fresh one each"
    )
    parser.add_argument("--samples", type=cli.positive_int, default=1, metavar="N", help="texts per prompt")
    parser.add_argument("--output", type=cli.output_file, metavar="FILE", help="write what is printed there too")
    parser.add_argument(
        "--allow-no-tokenizer", action="store_true", help="say so instead of a text where there is none"
    )
    arguments = parser.parse_args(argv)
    typed = arguments.prompt is None and arguments.prompts is None
    fresh = typed and arguments.seed is None
    seed = defaults.seed if arguments.seed is None else arguments.seed
    options = _options({**vars(arguments), "seed": seed})
    samples = arguments.samples
    if samples > 1 and options.temperature == 0:
        raise InputError(f"--samples {samples}: with --temperature 0 all texts of a prompt are the same")
    if typed and arguments.output is not None:
        raise InputError("--output needs --prompt or --prompts: what is typed is answered on the terminal")
    records = [] if arguments.prompts is None else read_prompts(arguments.prompts)

    from training.inference.load import load_model, require_tokenizer

    model, tokenizer = load_model(arguments.checkpoint)
    if tokenizer is None and arguments.allow_no_tokenizer:
        print(_NO_TEXT)
        if arguments.output is not None:
            write_text(arguments.output, f"{_NO_TEXT}\n")
        return 0
    tokenizer = require_tokenizer(tokenizer, arguments.checkpoint)
    if arguments.prompts is not None:
        texts = generate(model, tokenizer, [record["prompt"] for record in records], options, samples)
        numbered = ((record, sample) for record in records for sample in range(samples))
        with optional_writer(arguments.output) as write:
            for (record, sample), text in zip(numbered, texts, strict=True):
                number = {"sample": sample + 1, "seed": seed_of(options, sample)} if samples > 1 else {}
                result = {**record, **number, "text": text}
                print(orjson.dumps(result).decode(), flush=True)
                write(result)
    elif arguments.prompt is not None:
        printed = []
        for block in _blocks(model, tokenizer, arguments.prompt, options, samples):
            print(block, flush=True)
            printed.append(block + "\n")
        if arguments.output is not None:
            write_text(arguments.output, "".join(printed))
    else:
        _interactive(model, tokenizer, options, samples, fresh)
    return 0


def _blocks(
    model: "GPT2", tokenizer: "Tokenizer", prompt: str, options: GenerateSettings, samples: int
) -> Iterator[str]:
    """The texts of one prompt; of several each below a line that says its number and seed."""
    for sample, text in enumerate(generate(model, tokenizer, [prompt], options, samples)):
        yield f"--- sample {sample + 1}, seed {seed_of(options, sample)}\n{text}" if samples > 1 else text


def _options(given: dict[str, object]) -> GenerateSettings:
    from pydantic import ValidationError

    names = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    try:
        return GenerateSettings.model_validate({name: given[name] for name in names})
    except ValidationError as errors:
        error = errors.errors()[0]
        flag = "--" + str(error["loc"][0]).replace("_", "-")
        raise InputError(f"{flag} {error['input']}: {error['msg']}") from None


def _interactive(model: "GPT2", tokenizer: "Tokenizer", options: GenerateSettings, samples: int, fresh: bool) -> None:
    """Prompts from stdin until `stop` or its end; with `fresh` seeds each prompt has one of its own, which is told."""
    while True:
        print("prompt> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "stop":
            return
        if fresh:
            options = options.model_copy(update={"seed": secrets.randbelow(2**32)})
        try:
            for block in _blocks(model, tokenizer, line.rstrip("\n"), options, samples):
                print(block, flush=True)
            if fresh:
                print(f"(seed {options.seed})", flush=True)
        except InputError as error:  # of this prompt; the next may be better
            print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(cli.run(main))
