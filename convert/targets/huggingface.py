"""Write a source as a Hugging Face GPT-2 folder, tensor by tensor.

    DIR/config.json               for transformers, vLLM and llama.cpp's converter
        generation_config.json    the tokens that begin, end and pad a text
        model.safetensors         or model-00001-of-0000N.safetensors and their index
        tokenizer.json vocab.json merges.txt tokenizer_config.json     if the tokenizer is known
        README.md merge_report.json training.json                      by convert.merge_mp

Names are under `transformer.`, matrices are Conv1D's [in, out], qkv columns are [(q, k, v), head,
dim], the head is written only if it is not tied. The order of tensors is the model's, so that equal
weights give equal files whatever layout they come from.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from common.errors import InputError
from common.files import read_json, write_json
from common.tokenizer import Tokenizer
from convert.assemble import HUGGING_FACE, prefetched, widest_dtype
from convert.sources.ranks import GPT2_VOCABULARY
from convert.sources.source import Source
from training.checkpoint.files import write_file
from training.huggingface.config import CONFIG, GENERATION_CONFIG, INDEX, WEIGHTS, is_pretrained_folder, make_config
from training.huggingface.origin import VOCABULARIES, shard_name
from training.huggingface.tokenizer import vocabulary_size, write_tokenizer
from training.tensors import ROOT_LEAVES, hugging_face_name, layer_of, leaf_of

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

Files = dict[str, dict[str, Any]]
"""`{"size": bytes, "xxh3": hex}` by file name."""


def write_folder(
    folder: Path,
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: float = math.inf,
    progress: Callable[[int], None] = lambda count: None,
) -> Files:
    """Write all files but the report and training.json to `folder`, which exists and is empty.

    `dtype` None keeps the source's type, bit for bit. `progress` is called with the number of bytes
    after each tensor. Raises OSError for a full disk, CheckpointError if a value is too large.
    """
    dtype = dtype or widest_dtype(source)
    shapes = written_shapes(source)
    needed, free = source.model.parameters * dtype.itemsize, shutil.disk_usage(folder).free
    if needed > free:  # better said now than after minutes of writing
        raise InputError(
            f"{folder.parent}: {needed / 1e9:.1f} GB will be written, but only {free / 1e9:.1f} GB are free"
        )
    config = make_config(asdict(source.model), str(dtype).removeprefix("torch."))
    write_json(folder / CONFIG, config | _special_tokens(source, source.facts))
    write_json(folder / GENERATION_CONFIG, generation_config(source))
    _write_tokenizer(folder, source)
    shards = split_into_shards({name: math.prod(shapes[name]) * dtype.itemsize for name in shapes}, max_shard_size)
    wanted = {name: dtype for shard in shards for name in shard}
    tensors = prefetched(source, wanted, qkv=HUGGING_FACE, conv1d=True)
    files: Files = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else shard_name(number, len(shards))
        theirs = {hugging_face_name(name): (dtype, shapes[name]) for name in shard}
        files[file] = write_file(folder / file, theirs, islice(tensors, len(shard)), progress)
    if len(shards) > 1:
        places = {hugging_face_name(name): file for file, shard in zip(files, shards, strict=True) for name in shard}
        totals = {"total_parameters": source.model.parameters, "total_size": needed}
        write_json(folder / INDEX, {"metadata": totals, "weight_map": places})
    return files


def written_shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """The tensors that are written, in order, without vocabulary padding."""
    root = [name for name in ROOT_LEAVES if name in source.tensors]
    layers = sorted(source.tensors.keys() - root, key=lambda name: (layer_of(name), name))
    names = (*root[:2], *layers, *root[2:])  # the embeddings, the layers, the last norm
    return {name: leaf_of(name).shape(source.model.sizes, conv1d=True) for name in names}


def split_into_shards(sizes: Mapping[str, int], limit: float) -> list[list[str]]:
    """The names in each file, split as by transformers: a larger tensor has its own file."""
    shards: list[list[str]] = []
    current: list[str] = []
    used = 0
    for name, size in sizes.items():
        if size > limit:
            shards.append([name])
            continue
        if used + size > limit:
            shards.append(current)
            current, used = [], 0
        current.append(name)
        used += size
    return [*shards, current] if current else shards


def tokenizer_of(source: Source) -> Tokenizer | None:
    """The source's tokenizer, or GPT-2's if it has none and the vocabulary has that size."""
    own = any(path.name in VOCABULARIES for path in source.tokenizer_files)
    if source.tokenizer is None and source.model.vocab_size == GPT2_VOCABULARY and not own:
        return Tokenizer()
    return source.tokenizer


def check_tokenizer(source: Source) -> str:
    """A note if the tokenizer is of another kind than GPT-2's; InputError if it is damaged."""
    for path in source.tokenizer_files:
        try:
            if not path.is_file():
                raise InputError(f"{path}: not a file, or a link to nothing")
            if path.suffix == ".json":
                read_json(path)
        except InputError as error:
            raise InputError(f"{error}; restore it, remove it, or give --tokenizer") from None
    files = " and ".join(path.name for path in source.tokenizer_files if path.name in VOCABULARIES)
    if files and vocabulary_size(source.tokenizer) is None:
        return f"the tokenizer in {files} is not of GPT-2's kind: it is copied, but the commands here cannot use it"
    return ""


def _special_tokens(source: Source, *records: Mapping[str, Any]) -> dict[str, Any]:
    """SPECIAL_TOKENS: the first record that has each decides, else the tokenizer's end-of-text.

    A source that has a tokenizer_config.json names its padding token there, or has none.
    """
    vocabulary, tokenizer = source.model.vocab_size, tokenizer_of(source)
    end = GPT2_VOCABULARY - 1 if vocabulary == GPT2_VOCABULARY else None
    if tokenizer is not None and vocabulary_size(tokenizer) is not None:
        end = tokenizer.end_of_text
    names_padding = any(path.name == "tokenizer_config.json" for path in source.tokenizer_files)
    tokens: dict[str, Any] = dict.fromkeys(SPECIAL_TOKENS[: 2 if names_padding else 3], end)
    for record in reversed(records):
        tokens |= {key: record[key] for key in SPECIAL_TOKENS if _are_tokens(record.get(key), vocabulary)}
    return tokens


def _are_tokens(ids: Any, vocab_size: int) -> bool:
    """Whether `ids` is an id, or a list of ids, of the vocabulary without its padding."""
    return all(type(each) is int and 0 <= each < vocab_size for each in (ids if isinstance(ids, list) else [ids]))


def generation_config(source: Source) -> dict[str, Any]:
    """A Hugging Face source's own, with the tokens corrected."""
    recorded: Any = {}
    if is_pretrained_folder(source.path) and (source.path / GENERATION_CONFIG).is_file():
        recorded = read_json(source.path / GENERATION_CONFIG)
    recorded = recorded if isinstance(recorded, dict) else {}
    others = {key: value for key, value in recorded.items() if key not in SPECIAL_TOKENS}
    return others | _special_tokens(source, recorded, source.facts)


def _write_tokenizer(folder: Path, source: Source) -> None:
    """Copy a Hugging Face source's own files; others are made from the vocabulary."""
    tokenizer = tokenizer_of(source)
    if tokenizer is not None and vocabulary_size(tokenizer) is not None:
        write_tokenizer(folder, tokenizer, source.model.n_positions)
    for path in source.tokenizer_files:
        shutil.copyfile(path, folder / path.name)
