import random
import subprocess
import sys

import pycld2
import pytest

from corpus.text.language import Language, clear_language, language_of, script_language, thorough_language
from tests.corpus.text.test_filters import GERMAN
from tests.helpers import prose

CHINESE = "这只狗在森林里奔跑，寻找早上离开家的主人，但是它没有找到他，于是它回家了。"
TEXTS = {
    "en": prose(1),
    "de": GERMAN,
    "fr": "Le chien courait dans la forêt et cherchait son maître, qui avait quitté la maison le matin même. " * 8,
    "zh": CHINESE * 15,
}
ENGLISH = "The dog ran through the woods and looked for its master, who had left the house that morning. "  # 18 words


@pytest.mark.parametrize("code", TEXTS)
def test_both_judges_agree_on_a_text_of_one_language(code: str) -> None:
    found = language_of(TEXTS[code])
    assert found.code == code and found.score >= 0.97
    assert thorough_language(TEXTS[code]).code.partition("-")[0] == code


def test_texts_that_the_fast_judge_refuses_or_doubts_go_to_the_thorough_one() -> None:
    for text in (prose(1) + "\ufdd0", prose(1)[:400] + GERMAN[:400], "a b c"):
        code, score = thorough_language(text)
        assert clear_language(text) is None and language_of(text) == (code, round(score, 2))
    assert language_of("12345 67890 !!!") == language_of("") == Language("", 0.0)


# (sentence, what its characters are worth in words: 1.5 Chinese ones or 2.5 others make one; vowel
# signs have no worth)
MIXED = {
    "zh": ("狗在森林里奔跑寻找主人", 11 / 1.5),
    "ja": ("いぬはもりのなかを走って主人をさがした", 16 / 2.5 + 3 / 1.5),
    "ko": ("개는 숲속을 달려 주인을 찾았다", 13 / 2.5),
    "th": ("สุนัขวิ่งในป่ามองหาเจ้าของ", 20 / 2.5),
    "km": ("ឆ្កែរត់ក្នុងព្រៃ", 9 / 2.5),
}


@pytest.mark.parametrize("code", MIXED)
def test_scripts_without_spaces_weigh_by_what_their_characters_carry_beside_words(code: str) -> None:
    sentence, worth = MIXED[code]
    foreign, words = f"{sentence} 12 " * 20, round(20 * worth)
    for count, found in ((words - 4, code), (words + 4, "")):
        answer = script_language(foreign + "dog " * count)
        assert (answer.code if answer else "") == found
    assert language_of(foreign + ENGLISH * (words // 36)).code == code  # half as many words
    assert language_of(foreign + ENGLISH * (words // 9)).code == "en"  # twice as many
    halves = script_language(foreign + "dog " * (words // 2))
    assert halves and halves.score == pytest.approx(2 / 3, abs=0.01)


def test_names_of_functions_do_not_make_an_english_manual_page_danish(monkeypatch: pytest.MonkeyPatch) -> None:
    text = prose(1)

    def detect(encoded: bytes, returnVectors: bool) -> tuple[object, ...]:
        english = ("ENGLISH", "en", 90, 900.0), ("DANISH", "da", 10, 900.0)
        return True, len(encoded), english, ((0, len(encoded), "DANISH", "da"),)

    monkeypatch.setattr(pycld2, "detect", detect)  # as it answers for pages of erfc and returnVectors
    assert clear_language(text) is None and language_of(text).code == "en"


def test_the_order_of_the_texts_and_the_process_change_no_answer() -> None:
    texts = [GERMAN[n : n + 90] + prose(n, 12) for n in range(30)]
    answers = {text: language_of(text).code for text in texts}
    assert len(set(answers.values())) > 1
    random.Random(5).shuffle(texts)
    code = f"from corpus.text.language import language_of; print([language_of(text).code for text in {texts!r}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str([answers[text] for text in texts])
