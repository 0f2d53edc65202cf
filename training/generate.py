"""Continue a text.

    python -m training.generate --checkpoint merged/tiny --prompt "The list of" --max-tokens 64
    python -m training.generate --checkpoint results/demo/models/tiny --temperature 0

--checkpoint is a Hugging Face folder, a training run (its newest checkpoint) or one iter_* folder. Without --prompt it
reads prompts from the terminal, a line each, until `stop`. The same seed gives the same text. A text ends early at
end-of-text.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common import cli
from common.errors import InputError
from common.files import write_text
from common.settings import GenerateSettings

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from common.tokenizer import Tokenizer
    from training.model import GPT2


def choose(logits: "Tensor", options: GenerateSettings, generator: "Generator") -> int:
    """One token id from logits (V,): greedy at temperature 0, else drawn from the top k and the top p."""
    import torch

    if options.temperature == 0:
        return int(logits.argmax())
    ordered, ids = (logits.double() / options.temperature).sort(descending=True, stable=True)
    if options.top_k:
        ordered, ids = ordered[: options.top_k], ids[: options.top_k]
    probabilities = ordered.softmax(dim=0)
    before = probabilities.cumsum(dim=0) - probabilities  # probability of everything likelier
    probabilities[before >= options.top_p] = 0.0  # never the likeliest, which has nothing before it
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def generate(model: "GPT2", tokenizer: "Tokenizer", prompt: str, options: GenerateSettings) -> str:
    """The prompt and its continuation, at most `max_tokens` tokens more."""
    import torch

    tokens = [int(token) for token in tokenizer.encode(prompt)]
    begin = [tokenizer.end_of_text]  # a text stands behind the end of the one before
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(options.seed)
    model.eval()
    for _ in range(options.max_tokens):
        context = (begin + tokens)[-model.settings.seq_len :]
        with torch.no_grad():
            logits = model(torch.tensor([context], device=device))[0, -1].cpu()
        token = choose(logits[: tokenizer.vocab_size], options, generator)
        if token == tokenizer.end_of_text:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    defaults = GenerateSettings()
    parser = cli.parser("training.generate", __doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="model to use")
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue; leave out to type prompts")
    parser.add_argument("--max-tokens", type=int, default=defaults.max_tokens, metavar="N")
    parser.add_argument("--temperature", type=float, default=defaults.temperature, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=defaults.top_k, metavar="K", help="0 for all")
    parser.add_argument("--top-p", type=float, default=defaults.top_p, metavar="P")
    parser.add_argument("--seed", type=int, default=defaults.seed, metavar="S")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the text there too")
    arguments = parser.parse_args(argv)
    options = _options(vars(arguments))

    from training.load import load_model, require_tokenizer

    model, tokenizer = load_model(arguments.checkpoint)
    tokenizer = require_tokenizer(tokenizer, arguments.checkpoint)
    if arguments.prompt is None:
        _interactive(model, tokenizer, options)
        return 0
    text = generate(model, tokenizer, arguments.prompt, options)
    print(text)
    if arguments.output is not None:
        write_text(arguments.output, text + "\n")
    return 0


def _options(given: dict[str, object]) -> GenerateSettings:
    from pydantic import ValidationError

    names = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    try:
        return GenerateSettings.model_validate({name: given[name] for name in names})
    except ValidationError as errors:
        error = errors.errors()[0]
        flag = "--" + str(error["loc"][0]).replace("_", "-")
        raise InputError(f"{flag} {error['input']}: {error['msg']}") from None


def _interactive(model: "GPT2", tokenizer: "Tokenizer", options: GenerateSettings) -> None:
    """Prompts from stdin until `stop` or its end."""
    while True:
        print("prompt> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "stop":
            return
        print(generate(model, tokenizer, line.rstrip("\n"), options), flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
