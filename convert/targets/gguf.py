"""Write a source as the file of llama.cpp, GGUF, for its architecture `gpt2`.

Matrices are [out, in], qkv rows [(q, k, v), head, dim]; without `output.weight` the head is the
embedding. Vectors and positions are float32, as in llama.cpp's own converter,
convert_hf_to_gguf.py. The format: gguf.md in the docs of ggml.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from common.errors import InputError
from common.files import naming, read_json, read_text
from common.vocabulary import END_OF_TEXT, Vocabulary
from convert.assemble import HUGGING_FACE, prefetched
from convert.sources.source import Source
from convert.targets.huggingface import SPECIAL_TOKENS, check_tokenizer, generation_config, tokenizer_of, written_shapes
from training.tensors import leaf_of, llama_name

_F32, _F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
_FORMS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}


def write(source: Source, vocabulary: Vocabulary, path: Path, dtype: str) -> None:
    """Write the file, matrices as `dtype`; CheckpointError if a value is too large."""
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    shapes = {name: leaf_of(name).shape(source.model.sizes) for name in written_shapes(source)}  # [out, in]
    kinds = {name: kind if len(shape) == 2 and name != "wpe.weight" else _F32 for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_file_type(gguf.LlamaFileType[_FORMS[dtype]])
    _describe(writer, source, vocabulary)
    for name, shape in shapes.items():
        block, size = gguf.GGML_QUANT_SIZES[kinds[name]]
        count = math.prod(shape) // block * size
        writer.add_tensor_info(llama_name(name), shape, np.dtype(np.float32), count, raw_dtype=kinds[name])
    wanted = {name: torch.float16 if kinds[name] == _F16 else torch.float32 for name in shapes}
    tensors = prefetched(source, wanted, qkv=HUGGING_FACE, conv1d=False)
    try:
        with naming(path):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name in shapes:
                writer.write_tensor_data(gguf.quantize(next(tensors).numpy(), kinds[name]))
    finally:
        writer.close()


def check(source: Source, dtype: str) -> Vocabulary:
    """The vocabulary. Raises InputError for what llama.cpp cannot load."""
    model, (block, _) = source.model, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype.upper()]]
    if model.activation == "gelu":
        raise InputError(
            f"{source.path}: its GELU is the erf form, and llama.cpp has only the tanh form for GPT-2; use transformers"
        )
    if model.n_embd % block or model.n_inner % block:
        raise InputError(f"{source.path}: q8_0 needs widths that {block} divides; choose --dtype f16")
    check_tokenizer(source)
    tokenizer = tokenizer_of(source)
    if tokenizer is None or tokenizer.vocab_size > model.vocab_size or not tokenizer.vocabulary.merges:
        raise InputError(
            f"{source.path}: has no tokenizer with merges for its {model.vocab_size} tokens, which llama.cpp needs; "
            "merge it with convert.merge_mp --tokenizer DIR"
        )
    return tokenizer.vocabulary


def _describe(writer: gguf.GGUFWriter, source: Source, vocabulary: Vocabulary) -> None:
    """The metadata: sizes, tokens and merges, special ids, the chat template."""
    model, kind = source.model, gguf.TokenType
    files = {path.name: path for path in source.tokenizer_files}
    kinds = {token.content: kind.CONTROL if token.special else kind.USER_DEFINED for token in vocabulary.added}
    kinds[END_OF_TEXT] = kind.CONTROL
    tokens = [(text, kinds.get(text, kind.NORMAL)) for text in vocabulary.all_ids]
    tokens += [(f"[PAD{number}]", kind.CONTROL) for number in range(len(tokens), model.vocab_size)]
    texts, types = zip(*tokens, strict=True)
    values: dict[str, Any] = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2",
        "token_list": texts,
        "token_types": types,
    }
    values |= {"token_merges": vocabulary.merges, "add_bos_token": False, "chat_template": _chat_template(files)}
    values |= {"block_count": model.n_layer, "context_length": model.n_positions, "head_count": model.n_head}
    values |= {"embedding_length": model.n_embd, "feed_forward_length": model.n_inner, "quantization_version": 2}
    special, values["layer_norm_eps"] = generation_config(source), model.layer_norm_epsilon
    for key in SPECIAL_TOKENS:  # of several ids, the first
        values[key] = special[key][0] if isinstance(special.get(key), list) else special.get(key)
    for key, value in values.items():
        if value is not None:
            getattr(writer, f"add_{key}")(value)


def _chat_template(files: dict[str, Path]) -> str | None:
    """The template that transformers takes; of several in tokenizer_config.json, the default."""
    if "chat_template.jinja" in files:
        return read_text(files["chat_template.jinja"])
    path = files.get("tokenizer_config.json")
    template = read_json(path).get("chat_template") if path else None
    if isinstance(template, list):
        return {named["name"]: named["template"] for named in template}.get("default")
    return template
