"""Word perplexity: the published words, windows and norm, against transformers token by token."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2LMHeadModel

from common.files import read_json
from tests.helpers import run_main
from tests.training.helpers import Capsys
from tests.training.reference import SEQ_LEN, write_reference
from training.evaluate import main
from training.evaluation.scoring import sliding_windows
from training.evaluation.wikitext import count_words, detokenize

# In WikiText's format every line, even an empty one, ends with a space.
TEXT = """ 
 = Valve = 
 
 A valve weighs 1 @,@ 250 @.@ 5 kg ( 2 @,@ 757 lb ) at 20 ° C ; the owners ' hand @-@ made one is " lighter " . 
 
 = = History = = 
 
 It 's said : " Who turns it ? " No answer . . . [ sic ] came , and <unk> left ! 
"""  # noqa: W291, W293


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (" 1 @,@ 250 @.@ 5 ", " 1,250.5 "),
        (" it 's the owners ' way ", " it's the owners' way "),
        (' a " quoted thing " b ', ' a "quoted thing" b '),
        (" ' word ' ( round ) [ square ] { curly } ", " 'word' (round) [square] {curly} "),
        (" one , two ; three : four . Five ! Six ? Yes ", " one, two; three: four. Five! Six? Yes "),
        (" = Title = \n \n = = Part = = \n = = = Deep = = = \n", " = Title =\n\n== Part ==\n=== Deep ===\n"),
        (" = = = = Four = = = = \n a", " ==== Four ====\na"),
        (" 20 ° C \n and N more ", " 20°C\nand 1 more "),
        (" wait . . . what ", " wait. .. what "),
    ],
)
def test_detokenization_follows_the_published_rules(words: str, text: str) -> None:
    assert detokenize(words) == text


def loss_of_transformers(model: GPT2LMHeadModel, tokens: list[int], stride: int) -> float:
    """The mean loss, token by token, each with the context of the first window that reaches it."""
    total = 0.0
    for place in range(1, len(tokens)):
        begin = next(begin for begin in range(0, len(tokens), stride) if begin + SEQ_LEN >= place)
        with torch.no_grad():
            logits = model(torch.tensor([tokens[begin:place]])).logits[0, -1]
        total -= float(logits.log_softmax(-1)[tokens[place]])
    return total / (len(tokens) - 1)


def test_the_measures_equal_those_of_transformers(tmp_path: Path, capsys: Capsys) -> None:
    model, tokenizer = write_reference(tmp_path)
    file, output = tmp_path / "wiki.test.tokens", tmp_path / "result.json"
    file.write_text(TEXT)
    tokens = tokenizer(detokenize(TEXT))["input_ids"]
    for stride in (1, 7, SEQ_LEN):
        options = ("--task", "wikitext", "--data", file, "--stride", stride, "--output", output)
        assert run_main(main, "--checkpoint", tmp_path, *options) == 0
        found = read_json(output)
        loss, ratio = loss_of_transformers(model, tokens, stride), (len(tokens) - 1) / (count_words(TEXT) - 1)
        assert (found["tokens"], found["words"], found["stride"]) == (len(tokens) - 1, count_words(TEXT), stride)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert found["token_ratio"] == pytest.approx(ratio)
        nats = loss * (len(tokens) - 1)
        assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(TEXT.encode()), rel=1e-5)
        assert found["word_perplexity"] == pytest.approx(math.exp(loss * ratio), rel=1e-4)
        assert f"word perplexity {found['word_perplexity']:.2f}, " in capsys.readouterr().out


@given(st.integers(2, 300), st.integers(1, 50), st.data())
def test_every_token_is_scored_once_with_the_context_of_the_overlap(
    tokens: int, seq_len: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, seq_len))
    windows = list(sliding_windows(tokens, seq_len, stride))
    scored = [place for window in windows for place in range(window.end + 1 - window.scored, window.end + 1)]
    assert scored == list(range(1, tokens))
    for window in windows:
        assert 0 < window.scored <= window.end - window.begin <= seq_len
        assert window.begin == 0 or window.end - window.scored - window.begin == seq_len - stride
