"""llama.cpp gives our ids and logits from the written file; gguf's reader finds every value."""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.settings import TrainTokenizerSettings
from common.tokenizer import Tokenizer
from common.vocabulary import END_OF_TEXT, VocabularyFiles
from convert.sources.source import Architecture
from convert.targets.huggingface import write_folder
from convert.to_gguf import main
from corpus.train_tokenizer import train_tokenizer
from tests.conftest import Once
from tests.convert.encoded import SMALL
from tests.convert.helpers import as_conv1d, source_of
from tests.helpers import document, prose, run_main, write_shard
from tests.training.helpers import refusal
from training.inference.load import load_model
from training.model import GeluLinear, Linear
from training.tensors import all_names, leaf_of, llama_name

gguf = pytest.importorskip("gguf", reason="gguf is absent: pip install '.[gguf]'")
MODEL = replace(SMALL, n_layer=2, n_head=4, n_embd=32, n_inner=128, n_positions=64)
SCRIPTS = (
    "Привет 你好世界 こんにちは 한국어 العربية हिन्दी ไทย naïve ǅ ﬁ i̇ a\u0301 Straße it's DON'T we'LL 's\n  x".split(" ")
)
SPECIAL = [END_OF_TEXT, "<|endoftext", "[PAD300]", "<s>", "<|im_start|>", "</s>", "<0x0A>", "▁", "Ġ", "\0"]
DRAWN = {
    " \t\n\r\v\f\x85\u00a0\u1680\u2003\u2028\u202f\u3000\u200b\ufeff": 8,
    "0123456789٣३๓²½Ⅷ": 7,
    "😀👩\u200d👧👍🏽🏳\ufe0f🌈❤🇩🇪": 6,
    "abcdeXYZ .,;:!?-_/\\'\"(){}$#@": 12,
}


def weights_of(model: Architecture) -> dict[str, Tensor]:
    """Normal numbers; norms near 1, so that the logits differ between tokens."""
    rng, leaves = torch.Generator().manual_seed(5), {n: leaf_of(n) for n in all_names(model.n_layer, model.tied)}
    drawn = {name: torch.randn(leaf.shape(model.sizes), generator=rng) * 0.1 for name, leaf in leaves.items()}
    return {name: value + ("ln_" in name and name.endswith("weight")) for name, value in drawn.items()}


@pytest.fixture
def trained(once: Once) -> Tokenizer:
    def build(folder: Path) -> None:
        texts = [f"{prose(number, 300)} {' '.join(SCRIPTS)} 2026-11-26 12345\n\n    x" for number in range(30)]
        shard = write_shard(folder / "in.jsonl.zst", [document(number, text) for number, text in enumerate(texts)])
        files = VocabularyFiles(folder / "encoder.json", folder / "vocab.bpe")
        train_tokenizer([shard], files, TrainTokenizerSettings(vocab_size=600))

    folder = once("trained_vocabulary", build)
    return Tokenizer(VocabularyFiles(folder / "encoder.json", folder / "vocab.bpe"))


def folder_of(path: Path, tokenizer: Tokenizer | None, **changes: Any) -> Path:
    model = replace(MODEL, **({"vocab_size": tokenizer.vocab_size} if tokenizer else {}) | changes)
    path.mkdir()
    write_folder(path, source_of(weights_of(model), model, tokenizer=tokenizer))
    return path


def written(folder: Path, *options: str) -> Path:
    output = folder.with_name(f"{folder.name}{''.join(options)}.gguf")
    assert run_main(main, "--checkpoint", folder, "--output", output, "--force", *options) == 0
    return output


def hard_texts(count: int) -> Iterator[str]:
    rng = random.Random(11)
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 8)):
            drawn = rng.choice([*DRAWN, "points", "scripts", "special"])
            if drawn == "points":
                codes = [rng.randrange(rng.choice([0x80, 0x800, 0x10000, 0x110000])) for _ in range(rng.randint(1, 12))]
                parts.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000))
            elif drawn in DRAWN:
                parts.append("".join(rng.choices(drawn, k=rng.randint(1, DRAWN[drawn]))))
            else:
                parts.append(rng.choice(SCRIPTS if drawn == "scripts" else SPECIAL))
        yield "".join(parts)


def rounded_gelu(layer: GeluLinear, x: Tensor) -> Tensor:
    """GELU as llama.cpp computes it on a CPU: a table of float16 values by float16 argument."""
    return F.gelu(Linear.forward(layer, x).half().float(), approximate="tanh").half().float()


@pytest.mark.parametrize("vocabulary", ["trained", "gpt2"])
def test_llama_cpp_gives_our_ids_and_logits(
    trained: Tokenizer, vocabulary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = pytest.importorskip("llama_cpp", reason="llama.cpp is absent: pip install llama-cpp-python==0.3.36")
    tokenizer = trained if vocabulary == "trained" else Tokenizer()
    folder = folder_of(tmp_path / "m", tokenizer, tied=vocabulary == "trained")
    how = {"n_ctx": 64, "n_batch": 64, "logits_all": True, "type_k": 0, "type_v": 0, "verbose": False}
    theirs = llama.Llama(str(written(folder)), **how)  # 0: the cache in float32
    assert theirs.token_eos() == theirs.token_bos() == tokenizer.end_of_text
    texts = list(hard_texts(10_000))
    ids, lengths = tokenizer.encode_batch(texts)
    for text, ours in zip(texts, np.split(ids, lengths.cumsum()[:-1]), strict=True):
        assert theirs.tokenize(text.encode(), add_bos=False, special=False) == ours.tolist(), repr(text)
    tokens = torch.from_numpy(ids[:64].astype(np.int64))[None]
    theirs.eval(tokens[0].tolist())
    monkeypatch.setattr(GeluLinear, "forward", rounded_gelu)
    expected = load_model(folder)[0](tokens)[0].numpy(force=True)
    differences = np.abs(theirs.scores[:64] - expected).max(axis=1)  # at each position
    # Where float32 sums in another order fall on two sides of a float16 rounding, a position
    # differs by more.
    assert expected.std() > 0.1 and np.quantile(differences, 0.75) < 1e-5 and differences.max() < 1e-3
    theirs.close()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_the_file_holds_every_tensor_and_key(trained: Tokenizer, dtype: str, tied: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", trained, vocab_size=602, tied=tied, layer_norm_epsilon=2e-5)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ messages }}"}))
    tokens = json.loads((folder / "tokenizer.json").read_text())
    tokens["added_tokens"].append({**tokens["added_tokens"][0], "id": 601, "content": "<|end|>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    special = {"bos_token_id": 599, "eos_token_id": [601, 599], "pad_token_id": 600}
    (folder / "generation_config.json").write_text(json.dumps(special))
    reader = gguf.GGUFReader(written(folder, "--dtype", dtype))
    keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    ids = trained.vocabulary.ids
    assert keys.pop("tokenizer.ggml.tokens") == [*sorted(ids, key=ids.__getitem__), "<|reserved_token_600|>", "<|end|>"]
    assert keys.pop("tokenizer.ggml.token_type") == [1] * 599 + [3] * 3
    assert keys.pop("tokenizer.ggml.merges") == trained.vocabulary.merges
    assert keys.pop("gpt2.attention.layer_norm_epsilon") == pytest.approx(2e-5)
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 128}
    special = {"bos_token_id": 599, "eos_token_id": 601, "padding_token_id": 600, "add_bos_token": False}
    assert keys == {
        **{"general.architecture": "gpt2", "general.file_type": {"f32": 0, "f16": 1, "q8_0": 7}[dtype]},
        **{"general.quantization_version": 2, "gpt2.attention.head_count": 4},
        **{"tokenizer.chat_template": "{{ messages }}"},
        **{f"gpt2.{key}": size for key, size in sizes.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in {**special, "model": "gpt2", "pre": "gpt-2"}.items()},
    }
    model = replace(MODEL, vocab_size=602, tied=tied)
    written_tensors = {tensor.name: tensor for tensor in reader.tensors}
    expected = {name: one.read() for name, one in as_conv1d(weights_of(model), model).tensors.items()}
    assert sorted(written_tensors) == sorted(map(llama_name, expected))
    for name, value in expected.items():
        value = value.T if leaf_of(name).conv1d else value
        tensor, exact = written_tensors[llama_name(name)], value.dim() == 1 or name == "wpe.weight" or dtype == "f32"
        assert tensor.tensor_type.name == ("F32" if exact else dtype.upper())
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        # q8_0: half a step of the scale, 1/127 of the largest of 32 values, which itself is rounded
        # to float16
        bound = value.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) * (0.5 / 127 + 2**-10)
        error = (values - (value if dtype == "q8_0" or exact else value.half().float())).unflatten(-1, (-1, 32)).abs()
        assert (error <= bound).all() if dtype == "q8_0" and not exact else not error.any(), name


def test_what_llama_cpp_cannot_load_is_one_line_and_leaves_the_older_file(
    trained: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, good = tmp_path / "out.gguf", folder_of(tmp_path / "good", trained)
    output.write_text("older")

    def refused(folder: Path, *options: object) -> str:
        return refusal(capsys, main, "--checkpoint", folder, "--output", output, "--force", *options)

    assert "--force replaces it" in refusal(capsys, main, "--checkpoint", good, "--output", output)

    assert "erf" in refused(folder_of(tmp_path / "erf", trained, activation="gelu"))
    assert "--tokenizer" in refused(folder_of(tmp_path / "none", None, vocab_size=300))
    assert "f16" in refused(folder_of(tmp_path / "narrow", trained, n_embd=40), "--dtype", "q8_0")
    weights = good / "model.safetensors"
    assert str(weights) in refusal(capsys, main, "--checkpoint", good, "--output", weights, "--force")
    monkeypatch.setattr("gguf.GGUFWriter.write_tensor_data", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    assert "full" in refused(good)
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("convert.to_gguf.find_spec", lambda _: None)
    assert "pip install" in refused(good)
    assert output.read_text() == "older" and not list(tmp_path.glob("*.tmp"))
