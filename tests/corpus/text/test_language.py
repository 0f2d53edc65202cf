import random
import subprocess
import sys

import pytest

from corpus.text.language import clear_language, language_of, thorough_language
from tests.corpus.text.test_filters import GERMAN
from tests.helpers import prose

TEXTS = {
    "en": prose(1),
    "de": GERMAN,
    "fr": "Le chien courait dans la forêt et cherchait son maître, qui avait quitté la maison le matin même. " * 8,
    "zh": "这只狗在森林里奔跑，寻找早上离开家的主人，但是它没有找到他，于是它回家了。" * 15,
}


@pytest.mark.parametrize("code", TEXTS)
def test_both_judges_agree_on_a_text_of_one_language(code: str) -> None:
    assert language_of(TEXTS[code]) == code
    assert thorough_language(TEXTS[code]).partition("-")[0] == code


def test_texts_that_the_fast_judge_refuses_or_doubts_go_to_the_thorough_one() -> None:
    for text in (prose(1) + "\ufdd0", prose(1)[:400] + GERMAN[:400], "a b c"):
        assert clear_language(text) == "" and language_of(text) == thorough_language(text)
    assert language_of("12345 67890 !!!") == language_of("") == ""


def test_the_order_of_the_texts_and_the_process_change_no_answer() -> None:
    texts = [GERMAN[n : n + 90] + prose(n, 12) for n in range(30)]
    answers = {text: language_of(text) for text in texts}
    assert len(set(answers.values())) > 1
    random.Random(5).shuffle(texts)
    code = f"from corpus.text.language import language_of; print([language_of(text) for text in {texts!r}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str([answers[text] for text in texts])
