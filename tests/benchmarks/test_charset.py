from pathlib import Path

from tests.benchmarks.test_extract import write_articles
from tests.conftest import Command


def test_the_table_has_a_row_for_each_encoding_of_a_language(tmp_path: Path, command: Command) -> None:
    articles = write_articles(tmp_path, {"one": "A café’s “menu” – naïve, isn’t it? " * 5})
    (tmp_path / "books" / "ko-KR").mkdir(parents=True)
    (tmp_path / "books" / "ko-KR" / "a.html").write_text(
        "<p>한국어로 된 문서입니다. 여러 문장이 있어야 합니다.</p>" * 3
    )
    result = command("benchmarks.corpus", "charset", "--articles", articles, "--books", tmp_path / "books", timeout=300)
    rows = [[cell.strip() for cell in line.split("|")[1:]] for line in result.stdout.splitlines() if "%" in line]
    assert [row[:2] for row in rows if row[0] in ("en", "ko")] == [
        ["en", "windows-1252"],
        ["en", "utf-16le"],
        ["ko", "euc-kr"],
    ], result
    assert all(row[3] == "0.00%" for row in rows)
