import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langdetect import DetectorFactory

from corpus.text import language
from corpus.text.language import clear_language, language_of, sample, script_language, thorough_language
from tests.helpers import prose

GERMAN = "Der Hund lief durch den Wald und suchte nach seinem Herrn, der am Morgen das Haus verlassen hatte. " * 8
TEXTS = {
    "en": prose(1),
    "de": GERMAN,
    "fr": "Le chien courait dans la forêt et cherchait son maître, qui avait quitté la maison le matin même. " * 8,
    "ru": "Собака бежала по лесу и искала своего хозяина, который утром ушёл из дома и не вернулся. " * 8,
    "zh": "这只狗在森林里奔跑，寻找早上离开家的主人，但是它没有找到他，于是它回家了。" * 15,
    "he": "הכלב רץ ביער וחיפש את אדונו שעזב את הבית בבוקר ולא חזר אליו עד הערב המאוחר. " * 8,
}


@pytest.mark.parametrize("code", TEXTS)
def test_both_judges_agree_on_a_text_of_one_language(code: str) -> None:
    assert script_language(TEXTS[code]) or clear_language(TEXTS[code]), "no need for langdetect"
    assert language_of(TEXTS[code]) == code
    assert thorough_language(TEXTS[code]).partition("-")[0] == code


def test_a_signal_while_the_profiles_are_read_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    language._profiles.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(DetectorFactory, "add_profile", interrupt)
        with pytest.raises(KeyboardInterrupt):
            thorough_language(GERMAN)
    assert thorough_language(GERMAN) == "de"


def test_texts_that_cld2_refuses_or_doubts_go_to_langdetect(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (prose(1) + "\ufdd0", prose(1)[:400] + GERMAN[:400], "a b c"):
        assert clear_language(text) == ""
        assert language_of(text) == thorough_language(text)
    monkeypatch.setattr(language, "thorough_language", lambda text: "asked")
    assert language_of(prose(1) + "\ufdd0") == "asked" and language_of(prose(1)) == "en"


@pytest.mark.parametrize("address", ["https://news.example.com/{}", "{}@example.com"])
def test_addresses_are_in_no_language(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "thorough_language", lambda text: "asked")
    address = address.format("the-little-house-with-other-stories-that-we-have-read-before-they-were-written")
    assert language_of(f"{address}\n{GERMAN[:45]}\n" * 9) == "de"


def test_an_english_manual_page_is_not_danish_because_of_one_span() -> None:
    page = "The inverse hyperbolic cosine of a number is the value whose hyperbolic cosine is that number. " * 2
    page += "|| /* Since glibc 2.19: */ _DEFAULT_SOURCE || /* glibc <= 2.19: */ _BSD_SOURCE || _SVID_SOURCE\n" * 3
    page += "asinh(3), atanh(3), cacosh(3), cosh(3), sinh(3), tanh(3)\n" * 3
    assert language_of(page) == "en"


@pytest.mark.parametrize(
    ("code", "sentence", "english"),
    [
        ("zh", "安装软件包以前，请先更新软件源的列表，然后用下面的命令检查系统。", 65),
        ("ja", "パッケージをインストールする前に、次のコマンドでシステムを確認してください。", 45),
        ("ko", "패키지를 설치하기 전에 다음 명령으로 시스템을 확인하십시오.", 40),
    ],
)
def test_a_character_of_an_east_asian_script_carries_more_text_than_a_latin_letter(
    code: str, sentence: str, english: int
) -> None:
    words = "install the packages before you update the lists of the system and then check it again "
    assert language_of((sentence + words[:english]) * 20) == code
    assert language_of((sentence + words * 2) * 20) == "en"


def test_answers_are_repeatable_and_need_no_letters() -> None:
    assert language_of("12345 67890 !!!") == "" and language_of("") == ""
    assert len({language_of("Das ist ja nice, really") for _ in range(20)}) == 1


def test_a_long_text_is_judged_by_its_head_middle_and_end() -> None:
    english, german = prose(1, 3000), GERMAN * 40
    text = english[:10_000] + german[:30_000]
    assert thorough_language(text) == "en", "langdetect alone would read no further"
    assert language_of(text) == "de"
    assert len(sample("x" * 50_000_000)) < 10_010
    assert sample("x" * 9_999) == "x" * 9_999


@given(st.text(max_size=200))
def test_no_text_makes_it_fail(text: str) -> None:
    assert language_of(text) in ("", *(a + b for a in map(chr, range(97, 123)) for b in map(chr, range(97, 123)))) or (
        len(language_of(text)) == 3
    )


def test_the_order_of_the_texts_and_the_process_change_no_answer() -> None:
    rng = random.Random(5)
    texts = [GERMAN[n : n + 90] + prose(n, 12) for n in range(30)]
    answers = {text: language_of(text) for text in texts}
    assert len(set(answers.values())) > 1
    rng.shuffle(texts)
    assert {text: language_of(text) for text in texts} == answers
    code = f"from corpus.text.language import language_of; print([language_of(text) for text in {texts!r}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str([answers[text] for text in texts])
