import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.settings import CleanSettings, FastTextModel
from corpus.text.filters import filters
from corpus.text.verdicts import Change, Text
from tests.helpers import prose

GERMAN = (
    "Der Hund lief durch den Wald und suchte nach seinem Herrn, der am Morgen das Haus verlassen hatte. "
    "Es war ein kalter Tag im November, und die Blätter lagen schon lange auf dem Boden. "
) * 5


def details(text: str, settings: CleanSettings | None = None) -> dict[str, str]:
    found = ((rule.name, rule.judge(Text(text))) for rule in filters(settings or CleanSettings()))
    return {name: verdict for name, verdict in found if isinstance(verdict, str)}


def test_the_default_rules_are_those_of_openwebtext_and_say_what_they_found() -> None:
    assert [rule.name for rule in filters(CleanSettings())] == ["empty", "javascript", "short", "language"]
    assert details(prose(1)) == details("work day house field " * 30, CleanSettings(language="")) == {}
    assert details("") == {"empty": "no text", "short": "0 characters", "language": "no letters"}
    assert details("JavaScript " + prose(1)[:244])["javascript"] == "255 characters with 'javascript'"
    assert "javascript" not in details("JavaScript " + prose(1)[:245])
    assert details(prose(1)[:511]) == {"short": "511 characters"}
    assert details(prose(1)[:512]) == {}
    assert details(GERMAN) == {"language": "de"}
    assert details(GERMAN, CleanSettings(language="de")) == details(GERMAN, CleanSettings(language="")) == {}


def test_a_name_that_is_no_filter_is_refused_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"clean\.filters: 'fine_web' is not one of .*; fineweb\?"):
        filters(CleanSettings(filters=["c4", "fine_web"]))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="fasttext-predict has no wheel for Python 3.14")
def test_a_fasttext_model_drops_by_the_probability_of_a_label_and_leaves_it_in_meta(tmp_path: Path) -> None:
    """The model knows 22 words: those of history are good, those of shops are bad."""
    good, bad = "the history of the village\nand its river", "buy cheap now\nclick this offer"
    model = FastTextModel(path=Path(__file__).with_name("quality.bin"), label="good", name="quality")
    settings = CleanSettings(language="", min_characters=0, fasttext=[model])
    *_, rule = filters(settings)
    assert rule.judge(Text(good)) == Change(meta={"quality": 1.0})
    assert details(bad, settings) == {"quality": "good 0"}
    lenient = model.model_copy(update={"least": 0.0})
    assert not details(bad, settings.model_copy(update={"fasttext": [lenient]}))
    text = tmp_path / "text.bin"
    text.write_text("the history")
    for wrong, message in (
        ({"label": "fine"}, "no label 'fine', but bad, good"),
        ({"path": text}, "text.bin: no fastText model"), ({"path": tmp_path / "none"}, "none: no such file"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            *_, rule = filters(settings.model_copy(update={"fasttext": [model.model_copy(update=wrong)]}))
            rule.judge(Text(good))
