"""Write a GPT-2, with its vocabulary, as the one file that llama.cpp loads.

    python -m convert.to_gguf --checkpoint merged/tiny --output tiny.gguf
    python -m convert.to_gguf --checkpoint merged/gpt2-345m --output gpt2-345m.gguf --dtype f16

--checkpoint is a Hugging Face folder, a run of this toolkit, or anything else that convert.merge_mp
reads. --dtype is the type of matrices: f32 is exact, f16 rounds, q8_0 has 8 bits per weight and a
scale per 32. The file appears only when it is complete; --force replaces an older one. Needs the
package gguf (`pip install 'urls-to-gpt2[gguf]'`) and memory for a few copies of the largest tensor.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from common import cli
from common.errors import InputError
from common.files import atomic_path, check_outputs
from convert import command
from convert.arguments import options_of


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.to_gguf", __doc__)
    command.add_source(parser)
    parser.add_argument("--output", type=cli.output_file, required=True, metavar="FILE", help="file to write")
    parser.add_argument("--dtype", choices=("f32", "f16", "q8_0"), default="f32", help="default f32")
    parser.add_argument("--force", action="store_true", help="replace an older file")
    arguments = parser.parse_args(argv)
    output = arguments.output
    if find_spec("gguf") is None:
        raise InputError("convert.to_gguf needs the package gguf; pip install 'urls-to-gpt2[gguf]'")
    if output.is_file() and not arguments.force:
        raise InputError(f"{output}: exists already; --force replaces it")
    from convert.sources import find
    from convert.targets import gguf

    source = find.open_source(arguments.checkpoint, options_of(arguments))
    vocabulary = gguf.check(source, arguments.dtype)
    check_outputs([output], [*source.files, *source.tokenizer_files])
    command.announce(source)
    with atomic_path(output) as temporary:
        gguf.write(source, vocabulary, temporary, arguments.dtype)
    print(f"{output}: llama.cpp, {arguments.dtype}, {output.stat().st_size / 1e6:.1f} MB, from {source.path}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
