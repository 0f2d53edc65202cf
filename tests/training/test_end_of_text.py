"""A tokenizer whose end-of-text is id 0, as Hugging Face's course makes one: from text to text."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast

from common.files import read_json
from common.tokenizer import Tokenizer
from common.vocabulary import END_OF_TEXT
from convert import merge_mp
from corpus.index import IndexedDataset, read_meta
from corpus.index.documents import write_tombstones
from tests.helpers import called, document, prose, run_main, write_shard
from tests.training.helpers import plan_of, settings_of, train_tiny, write_config
from tests.training.reference import random_gpt2
from training import checkpoint
from training.dataset.batches import BatchForm, read_batch
from training.dataset.corpus import Corpus
from training.inference.load import load_model
from training.inference.sampling import generate
from training.loss import IGNORED

DOCUMENTS = 40
RULES = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 and a tokenizer made with `train_new_from_iterator`."""
    folder = tmp_path_factory.mktemp("course")
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END_OF_TEXT])
    old = PreTrainedTokenizerFast(tokenizer_object=library, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)
    new = old.train_new_from_iterator(map(prose, range(20)), 300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    assert new.eos_token_id == 0, "what this file is about"
    new.save_pretrained(folder)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": len(new)}
    random_gpt2(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    return folder


def tokenized(folder: Path, start: Path) -> Path:
    """The configuration of a run whose documents are tokenized; it fine-tunes the model."""
    tokenizer = Tokenizer(start / "tokenizer.json")
    model = {"n_layer": 1, "n_head": 2, "n_embd": 16, "dropout": 0.0, "vocab_size": tokenizer.vocab_size}
    train = {"iterations": 2, "sample_interval": 1, "sample_prompt": "", **RULES}
    config = write_config(folder, model, {}, train, finetune=str(start))
    raw = yaml.safe_load(config.read_text()) | {"tokenize": {"encoder_json": str(tokenizer.files), "min_tokens": 1}}
    config.write_text(yaml.safe_dump(raw))
    shard = write_shard(folder / "in.jsonl.zst", [document(number, prose(number, 9)) for number in range(DOCUMENTS)])
    prefix = settings_of(config).dataset_prefix
    keys = (f"tokenize.encoder_json={tokenizer.files}", "tokenize.min_tokens=1")
    done = called("corpus.tokenize", "--input", shard, "--output-prefix", folder / "made", *keys)
    assert done.returncode == 0, done.stderr
    prefix.parent.mkdir()
    for path in folder.glob("made_text_document.*"):
        path.rename(prefix.with_name(prefix.name + path.suffix))
    return config


def test_it_ends_documents_from_tokenize_to_a_generated_text(tmp_path: Path, start: Path) -> None:
    config, theirs = tokenized(tmp_path, start), AutoTokenizer.from_pretrained(start)
    prefix = settings_of(config).dataset_prefix
    dataset, meta = IndexedDataset(prefix), read_meta(prefix)
    assert meta is not None and (meta.vocab_size, meta.end_of_text) == (len(theirs), 0)
    assert dataset[3].tolist() == [*theirs(prose(3, 9))["input_ids"], 0]
    shown = called("corpus.index", "inspect", prefix).stdout
    assert f"end of text 0\nend of text  closes {DOCUMENTS} of {DOCUMENTS} documents" in shown

    plan = plan_of(config)
    batch = read_batch(plan.data.train, BatchForm(plan.data.train.end_of_text, **RULES), range(8))
    ended = batch.tokens == 0
    assert ended.any() and batch.positions is not None and batch.ends is not None
    assert (batch.targets[ended] == IGNORED).all() and (batch.targets[~ended] != IGNORED).all()
    assert (batch.positions[:, 1:][ended[:, :-1]] == 0).all()
    assert {int(end) for end in batch.ends[0]} >= {at + 1 for at in ended[0, :-1].nonzero().flatten().tolist()}

    assert train_tiny(config) == 0
    model, merged = tmp_path / "models/tiny", tmp_path / "merged"
    assert checkpoint.resolve(model).end_of_text == 0
    assert run_main(merge_mp.main, "--checkpoint", model, "--output", merged) == 0
    for name in ("config.json", "generation_config.json"):
        assert [read_json(merged / name)[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")] == [0] * 3
    loaded, again = GPT2LMHeadModel.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
    assert loaded.config.eos_token_id == again.eos_token_id == 0
    assert again(f"{prose(2)}{END_OF_TEXT}")["input_ids"] == theirs(f"{prose(2)}{END_OF_TEXT}")["input_ids"]
    for source in (model, merged):  # begun by end-of-text, and ended by it: no other token can be drawn
        ours, tokenizer = load_model(source)
        assert tokenizer is not None and tokenizer.end_of_text == 0
        options = settings_of(config).generate.model_copy(update={"max_tokens": 5})
        assert next(generate(ours, tokenizer, [""], options))
        ours.ln_f.weight.data.zero_()
        ours.ln_f.bias.data.copy_(1000 * ours.wte.weight.data[0])
        assert list(generate(ours, tokenizer, ["the"], options)) == ["the"]


def test_a_removed_document_is_no_target_and_stays_a_tombstone(tmp_path: Path, start: Path) -> None:
    config = tokenized(tmp_path, start)
    prefix = settings_of(config).dataset_prefix
    before = IndexedDataset(prefix)[5].tolist()
    write_tombstones(prefix, [5])
    assert IndexedDataset(prefix)[5].tolist() == [0] * len(before)
    corpus = plan_of(config).data.train.parts[0].corpus
    assert corpus.end_of_text == 0 and corpus.lengths[5] == len(before)
    from_it = read_batch(_Whole(corpus), BatchForm(0), [0])
    span = slice(int(corpus.starts[5]), int(corpus.starts[5]) + len(before) - 1)
    assert (from_it.targets[0, span] == IGNORED).all()
    assert int((from_it.targets == IGNORED).sum()) == len(before), "and the one after the document before it"


def test_a_dataset_of_another_tool_has_the_end_of_text_of_the_runs_tokenizer(tmp_path: Path, start: Path) -> None:
    config = tokenized(tmp_path, start)
    prefix = settings_of(config).dataset_prefix
    prefix.with_name(f"{prefix.name}.json").unlink()
    assert plan_of(config).data.train.end_of_text == 0
    assert train_tiny(config) == 0
    assert load_model(tmp_path / "models/tiny")[1] is not None


class _Whole:
    """A corpus as one sample."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def sample(self, number: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """All tokens."""
        return np.array(self.corpus.tokens, np.int64)
