"""Loss and perplexity equal a simple sum over windows."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common.settings import ModelSettings
from common.tokenizer import Tokenizer
from convert.merge_mp import merge
from corpus.index import IndexWriter, Meta
from tests.convert.helpers import write_pretrained
from tests.helpers import document, write_shard
from tests.training.helpers import byte_documents, make_run, run_main, settings_of, write_corpus
from training.dataset.corpus import Corpus, Samples
from training.evaluate import main
from training.evaluation.loss import evaluate
from training.generate import main as generate_main
from training.inference.load import load_model, model_from_weights
from training.model import GPT2, initial_value
from training.train import main as train_main


def tiny_model(vocab_size: int) -> GPT2:
    settings = ModelSettings(n_layer=1, n_head=2, n_embd=8, seq_len=16, vocab_size=vocab_size, dropout=0.5)
    parameters = GPT2(settings).named_parameters()
    return model_from_weights(
        settings, {name: initial_value(name, p.shape, settings, 3) * 20 for name, p in parameters}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 with the GPT-2 vocabulary as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("model")
    model = tiny_model(50257)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_pretrained(path, weights, model.settings, Tokenizer())
    return path


def plain_loss(model: GPT2, tokens: np.ndarray) -> float:
    """The mean loss over windows of seq_len that do not overlap; every token but the first is predicted once."""
    total, stream = torch.zeros((), dtype=torch.float64), torch.from_numpy(tokens.astype(np.int64))
    for begin in range(0, len(tokens) - 1, model.settings.seq_len):
        window = stream[begin : begin + model.settings.seq_len + 1]
        with torch.no_grad():
            total += F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum")
    return float(total) / (len(tokens) - 1)


@pytest.mark.parametrize("documents", [1, 7])
def test_every_token_counts_once_even_in_the_short_last_window(documents: int) -> None:
    model = tiny_model(257)
    texts = [document.astype(np.int64) for document in byte_documents(documents)]
    corpus = Corpus.in_memory(Path("c"), texts)
    result = evaluate(model, Samples(corpus, range(documents), 16))
    assert result["tokens"] == corpus.lengths.sum() - 1
    assert result["loss"] == pytest.approx(plain_loss(model, np.concatenate(texts)), rel=1e-5)
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))


def test_a_text_shorter_than_a_window_is_evaluated() -> None:
    model, tokens = tiny_model(257), np.array([5, 9, 200])
    result = evaluate(model, Samples(Corpus.in_memory(Path("c"), [tokens]), range(1), 16))
    assert (result["tokens"], result["loss"]) == (2, pytest.approx(plain_loss(model, tokens), rel=1e-5))


def test_a_share_of_the_windows_is_spread_over_the_data_and_its_time_is_said_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("training.evaluation.loss.LONG", 0)
    model = tiny_model(257)
    samples = Samples(Corpus.in_memory(Path("c"), list(byte_documents(7))), range(7), 16)
    chosen = [number * samples.per_epoch // 5 for number in range(5)]
    result = evaluate(model, samples, share=5.5 / samples.per_epoch)
    assert (result["tokens"], result["available_tokens"]) == (5 * 16, samples.tokens - 1)
    assert result["loss"] == pytest.approx(np.mean([plain_loss(model, samples.sample(n)) for n in chosen]), rel=1e-5)
    assert f"note: c: 80 of {samples.tokens - 1:,} tokens take about 0:00:00 on this CPU" in capsys.readouterr().err


def test_a_text_file_and_a_shard_of_documents_are_encoded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["The quick brown fox jumps over the lazy dog. " * 3, "Another document."]
    (tmp_path / "one.txt").write_text(texts[0])
    write_shard(tmp_path / "two.jsonl.zst", [document(number, text) for number, text in enumerate(texts)])
    tokenizer = Tokenizer()
    encoded = [np.append(tokenizer.encode(text), tokenizer.end_of_text) for text in texts]
    model = tiny_model(50257)
    for name, tokens in (("one.txt", encoded[0]), ("two.jsonl.zst", np.concatenate(encoded))):
        output = tmp_path / "result.json"
        assert run_main(main, "--checkpoint", folder, "--data", tmp_path / name, "--output", output) == 0
        found = json.loads(output.read_text())
        assert found["tokens"] == len(tokens) - 1
        assert found["loss"] == pytest.approx(plain_loss(model, tokens), rel=1e-5)
        size = sum(len(text.encode()) for text in texts[: 1 + name.startswith("two")])
        size -= len(tokenizer.decode(tokens[:1]).encode())  # the first token is not predicted
        assert found["bytes"] == size
        assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / np.log(2) / size)
        assert f"validation loss {found['loss']:.4f}, perplexity {found['perplexity']:.2f}" in capsys.readouterr().out


def test_several_datasets_have_a_line_each_and_all_tokens_have_the_same_weight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(257)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    (tmp_path / "model").mkdir()
    write_pretrained(tmp_path / "model", weights, model.settings)
    sets = {name: byte_documents(count) for name, count in (("a", 2), ("b", 9))}
    for name, documents in sets.items():
        write_corpus(tmp_path / name, documents)
    output = tmp_path / "result.json"
    data = [tmp_path / name for name in sets]
    assert run_main(main, "--checkpoint", tmp_path / "model", "--data", *data, "--output", output) == 0
    found = json.loads(output.read_text())
    tokens = {name: np.concatenate(documents) for name, documents in sets.items()}
    losses = {name: plain_loss(model, part) for name, part in tokens.items()}
    for name, path in zip(sets, data, strict=True):
        assert found["each"][str(path)]["loss"] == pytest.approx(losses[name], rel=1e-5)
    expected = sum(losses[name] * (len(tokens[name]) - 1) for name in sets) / (found["tokens"])
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert (found["tokens"], found["documents"]) == (sum(map(len, tokens.values())) - 2, 11)
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        *(f"{path} (all)" for path in data),
        "all",
    ]
    limit = ("--max-tokens", found["tokens"] // 2)  # both are sampled alike
    assert run_main(main, "--checkpoint", tmp_path / "model", "--data", *data, *limit, "--output", output) == 0
    half = json.loads(output.read_text())
    assert half["tokens"] <= found["tokens"] // 2 and half["available_tokens"] == found["tokens"]
    for path in map(str, data):
        assert half["each"][path]["tokens"] == pytest.approx(found["each"][path]["tokens"] / 2, abs=2 * 16)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on 40 documents of bytes with the split 80,10,10, and of its merged model."""
    folder = tmp_path_factory.mktemp("run")
    config = make_run(folder, documents=40, train={"iterations": 1, "split": "80,10,10"})
    assert run_main(train_main, "--config", config, "--model", "tiny") == 0
    merge(folder / "models" / "tiny", folder / "merged")
    return folder


@pytest.mark.parametrize("checkpoint", ["models/tiny", "models/tiny/iter_0000001", "merged"])
def test_a_part_follows_the_training_split_and_another_split_gives_a_note(
    trained: Path, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = trained / "dataset/corpus_text_document", tmp_path / "result.json"
    asked = ("--checkpoint", trained / checkpoint, "--data", data, "--output", output)
    capsys.readouterr()
    assert run_main(main, *asked, "--part", "valid") == 0
    found = json.loads(output.read_text())
    assert (found["documents"], found["split"]) == (4, "80,10,10")
    assert capsys.readouterr().err == ""
    assert run_main(main, *asked, "--part", "valid", "--split", "0.8,0.1,0.1") == 0
    assert json.loads(output.read_text())["loss"] == found["loss"]
    card = json.loads((tmp_path / "result.run.json").read_text())
    assert [entry["path"] for entry in card["inputs"]][-2:] == [f"{data}.bin", f"{data}.idx"]
    assert capsys.readouterr().err == ""
    assert run_main(main, *asked, "--part", "valid", "--split", "60,30,10") == 0
    assert "trained on 8 of the 12 documents of --part valid; its own split is 80,10,10" in capsys.readouterr().err
    assert run_main(main, *asked, "--part", "valid", "--split", "1e308,0,0") == 2
    assert "--split '1e308,0,0' must be three shares" in capsys.readouterr().err


def test_a_part_needs_a_split_if_the_training_is_not_known(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "gpt2", byte_documents(40), 50257)
    asked = ("--checkpoint", folder, "--data", tmp_path / "gpt2", "--part", "test")
    assert run_main(main, *asked) == 2
    error = capsys.readouterr().err
    assert "for --part test give --split, the train.split of its training" in error and error.count("\n") == 1
    assert run_main(main, *asked, "--split", "80,10,10") == 0


def test_a_model_of_another_vocabulary_has_no_tokenizer_and_merges_without_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if GPT-2's 50,257 tokens would fit into it."""
    config = make_run(tmp_path, model={"vocab_size": 60000}, train={"iterations": 1})
    write_corpus(settings_of(config).dataset_prefix, byte_documents(40), 60000)
    assert run_main(train_main, "--config", config, "--model", "tiny") == 0
    for run in (tmp_path, trained):
        assert "without tokenizer" in merge(run / "models" / "tiny", tmp_path / f"{run.name}-merged")
        assert not (tmp_path / f"{run.name}-merged" / "vocab.json").exists()
        assert load_model(tmp_path / f"{run.name}-merged")[1] is None
        sample = ("--checkpoint", tmp_path / f"{run.name}-merged", "--prompt", "x", "--output", tmp_path / "sample.txt")
        assert run_main(generate_main, *sample) == 2
        assert "no tokenizer" in capsys.readouterr().err
        assert run_main(generate_main, *sample, "--allow-no-tokenizer") == 0  # as in the workflow
        assert (tmp_path / "sample.txt").read_text() == capsys.readouterr().out.splitlines(keepends=True)[-1]
    config = make_run(tmp_path / "same", model={"vocab_size": 50257}, train={"iterations": 1})
    with IndexWriter(settings_of(config).dataset_prefix, np.uint16, Meta(50257, 0)) as writer:  # end-of-text is token 0
        for one in byte_documents(40):
            writer.add_document(one)
    assert run_main(train_main, "--config", config, "--model", "tiny") == 0
    assert load_model(tmp_path / "same" / "models" / "tiny")[1] is None


@pytest.mark.parametrize(
    ("data", "more", "says"),
    [
        ("absent", (), "neither a file nor the PREFIX of a dataset"),
        ("bytes", (), "vocabulary of 257"),
        ("text.txt", ("--part", "valid"), "--part valid needs a dataset"),
        ("empty.jsonl", (), "no documents"),
    ],
)
def test_wrong_data_gives_one_line(
    folder: Path, tmp_path: Path, data: str, more: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "bytes", byte_documents(3))
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "empty.jsonl").write_text("")
    assert run_main(main, "--checkpoint", folder, "--data", tmp_path / data, *more) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
