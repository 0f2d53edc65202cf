from pathlib import Path

import ftfy
import pytest
from ftfy.badness import MOJIBAKE_CATEGORIES
from hypothesis import example, given
from hypothesis import strategies as st

from common.files import read_json
from common.settings import CleanSettings
from corpus.clean import clean, fix_text, repair
from tests.conftest import Command
from tests.corpus.text.test_filters import GERMAN
from tests.helpers import assert_one_line_error, called, document, prose, read_shard, write_shard


def run(folder: Path, texts: list[str], settings: CleanSettings | None = None) -> tuple[list[str], dict[str, int]]:
    source = write_shard(folder / "in.jsonl.zst", [document(n, text) for n, text in enumerate(texts)])
    stats = clean([source], folder / "out.jsonl.zst", settings or CleanSettings(), allow_empty=True)
    return [found["text"] for found in read_shard(folder / "out.jsonl.zst")], dict(stats.reasons)


def test_texts_are_repaired_and_white_space_is_folded_where_asked(tmp_path: Path) -> None:
    page = prose(1) + "\n\n\nname     size\na.txt    1024\n\n    def f():\n\treturn 1\n"
    kept, reasons = run(tmp_path, [page, "\x00" * 600 + prose(1), "\x1b[0m" * 200, "1 " * 600])
    assert kept == [page, prose(1)] and reasons == {"language": 1, "empty": 1}
    folded = prose(1) + "\n\nname size\na.txt 1024\n\ndef f():\nreturn 1"
    assert run(tmp_path, [page], CleanSettings(fold_whitespace=True))[0] == [folded]


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        ("N\bNA\bAM\bM\bM, _\bf_\bi, g\b_, +\bo, a\b\n\bb", "NAM, fi, g, o, a\nb"),  # manual pages
        ("exam\u00adple, word\u2060joiner, zero\u200bwidth, &shy;entity", "example, wordjoiner, zerowidth, entity"),
        ("می\u200cخواهم 👨\u200d👩 ไทย\u200bภาษา ខ្មែរ\u200bភាសា", None),  # they change letters, or separate words
    ],
)
def test_overstriking_and_invisible_characters_inside_words_go(text: str, repaired: str | None) -> None:
    assert repair(text) == (text if repaired is None else repaired)


def test_several_languages_are_kept_with_code_and_score_beside_the_metadata_of_the_source(tmp_path: Path) -> None:
    french = "Le chien courait dans la forêt et cherchait son maître, qui avait quitté la maison le matin même. " * 8
    documents = [document(n, text) for n, text in enumerate((prose(1), GERMAN, french, prose(2), "Too short."))]
    documents[1]["meta"] = {"language": "German", "date": 1999}
    source = write_shard(tmp_path / "in.jsonl.zst", documents)

    def metas(language: str | list[str]) -> tuple[list[object], dict[str, int], dict[str, tuple[int, int]]]:
        stats = clean([source], tmp_path / "out.zst", CleanSettings(language=language))
        found = [kept.get("meta") for kept in read_shard(tmp_path / "out.zst")]
        return found, stats.extra.get("languages", {}), stats.kept_by.get("detected_language", {})

    english = {"detected_language": "en", "detected_score": 0.99}
    german = {"language": "German", "date": 1999, "detected_language": "de", "detected_score": 0.99}
    found, counts, kept = metas(["de", "en"])
    assert found == [english, german, english] and counts == {"en": 2, "de": 1, "fr": 1}
    assert {code: documents for code, (documents, _) in kept.items()} == {"en": 2, "de": 1}
    assert metas("en")[0] == metas(["en"])[0] == [english, english]
    assert metas("") == metas([]) == ([None, documents[1]["meta"], None, None], {}, {})
    for wrong in ("xx", ["en", "iw"]):
        with pytest.raises(ValueError, match="is not the code of a language"):
            CleanSettings(language=wrong)


def test_a_truncated_shard_is_one_line_and_leaves_nothing(tmp_path: Path, command: Command) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, prose(n)) for n in range(20)])
    source.write_bytes(source.read_bytes()[:-30])
    result = command("corpus.clean", "--input", source, "--output", tmp_path / "out.jsonl.zst", "--workers", 2)
    assert_one_line_error(result, "in.jsonl.zst")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl.zst"]


def test_the_command_writes_its_statistics(tmp_path: Path) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(1, "wording # " * 200), document(2, "Too short.")])
    (tmp_path / "c.yaml").write_text("run: x\nurls: [x]\nclean: {filters: [gopher]}\n")
    options = ("--output", tmp_path / "out.zst", "--stats", tmp_path / "s.json", "--config", tmp_path / "c.yaml")
    assert_one_line_error(called("corpus.clean", "--input", source, *options), "in.jsonl.zst")
    assert not (tmp_path / "out.zst").exists()
    assert called("corpus.clean", "--input", source, "--allow-empty", *options).returncode == 0
    assert read_json(tmp_path / "s.json")["reasons"] == {"gopher_symbols": 1, "short": 1}
    assert read_shard(tmp_path / "out.zst") == []
    explained = called("corpus.clean", "--explain", source)
    assert explained.returncode == 0 and "drop (short)" in explained.stdout


PLAIN = "".join(map(chr, range(32, 127))) + "\t\n\f–—…"
# what ftfy's steps act on, beside what they leave alone
SIGNS = "&;#<>\r\x00\x0b\x1b\x1f\x7f\x80\x85\x9f\u2028\u2029ﬁǆＡﾊ\u3000\u0301Å\ud83d\udca9\ufeff\ufffd\xa0"
MOJIBAKE = "".join(characters for characters in MOJIBAKE_CATEGORIES.values() if "-" not in characters)
PIECES = st.sampled_from("&amp; &eacute; <b> \x1b[31m schÃ¶n â€œquotedâ€ donâ€™t \r\n \n a\u0301 Ã  “é” ’s".split(" "))
TEXTS = st.one_of(
    *(st.text(PLAIN + more) for more in ("‘’“”", "àéöÿß÷", SIGNS)),
    *(st.text("aé —ã…â‘’“”", max_size=8), st.text(MOJIBAKE, max_size=4), st.text(max_size=5), PIECES),
)


@given(st.lists(TEXTS).map("".join))
@example("é”“")  # in Windows-1252 the bytes of a Chinese character
@example("a &amp; b\nc &lt; d <i>\ne &amp; f’s\nplain\ng &amp; “h”\n")  # markup: entities stay from there on
@example("é’" * 510_000 + "&amp; schÃ¶n <b> &amp;\nafter &amp; all")  # longer than ftfy reads at once
def test_the_short_cut_gives_what_ftfy_gives(text: str) -> None:
    assert fix_text(text) == ftfy.fix_text(text)
