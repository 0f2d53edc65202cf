"""transformers reads the Hugging Face folders that we write, and we read those that it writes."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from common.errors import CheckpointError
from common.settings import ModelSettings
from common.tokenizer import Tokenizer
from tests.training.reference import random_gpt2
from training.huggingface.pretrained import convert_tensors
from training.huggingface.tokenizer import read_tokenizer, write_tokenizer
from training.tensors import all_names

SMALL = ModelSettings(n_layer=2, n_head=3, n_embd=24, seq_len=20, vocab_size=101, dropout=0.2)


def test_the_folders_tokenizer_is_gpt2s_from_each_of_its_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, Tokenizer(), 8)
    text = "Naïve café — 3.14"
    expected = Tokenizer().encode(text).tolist()
    for _ in range(2):
        theirs, ours = AutoTokenizer.from_pretrained(tmp_path), read_tokenizer(tmp_path)
        assert ours is not None and ours.encode(text).tolist() == expected
        assert theirs(text)["input_ids"] == expected
        assert theirs.eos_token_id == ours.end_of_text == 50256
        for name in ("vocab.json", "merges.txt"):  # tokenizer.json is enough, for transformers and for us
            (tmp_path / name).unlink(missing_ok=True)


def test_an_untied_head_or_a_tensor_of_another_shape_is_refused() -> None:
    sizes = SMALL.model_dump(include={"vocab_size", "n_embd", "n_layer", "n_head"})
    theirs = random_gpt2(n_positions=SMALL.seq_len, **sizes).state_dict()
    assert dict(convert_tensors(theirs, SMALL)).keys() == set(all_names(SMALL.n_layer))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        dict(convert_tensors({**theirs, "lm_head.weight": theirs["transformer.wte.weight"] + 1}, SMALL))
    name = "transformer.h.1.attn.c_attn.weight"
    with pytest.raises(CheckpointError, match=r"h\.1\.attn\.c_attn\.weight' has shape \[24, 71\], .* \[24, 72\]"):
        dict(convert_tensors({**theirs, name: theirs[name][:, 1:]}, SMALL))
