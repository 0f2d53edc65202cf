import gzip
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.clean import documents, packaged_texts, read_texts
from common.errors import InputError
from tests.conftest import Command
from tests.helpers import prose


def write_texts(folder: Path) -> Path:
    (folder / "de").mkdir(parents=True)
    (folder / "en.txt").write_text(prose(1, 3000))
    (folder / "more.txt.gz").write_bytes(gzip.compress(prose(2, 3000).encode()))
    (folder / "page.html").write_text(f"<html><body><article><p>{prose(3, 300)}</p></article></body></html>")
    (folder / "de" / "de.txt").write_text("Der Hund lief durch den Wald und suchte nach seinem Herrn. " * 200)
    (folder / "other.bin").write_text("not a text")
    return folder


def test_documents_are_cut_from_every_file_of_a_folder_and_always_the_same(tmp_path: Path) -> None:
    folder = write_texts(tmp_path)
    texts = list(read_texts(folder))
    assert len(texts) == 4 and any(text.startswith("Der Hund") for text in texts)
    found = list(documents(iter(texts), 1000))
    assert found == list(documents(read_texts(folder), 1000))
    assert "".join(found[:3]) in "".join(texts) and max(map(len, found)) < 16_000
    assert found[:5] == list(documents(iter(texts), 5))
    with pytest.raises(InputError, match="no file that ends in"):
        list(read_texts(tmp_path / "none"))


def test_without_a_folder_there_are_texts_in_several_languages() -> None:
    texts = list(islice(packaged_texts(), 60))
    assert any(" und " in text for text in texts) and any(" the " in text for text in texts)


def test_the_command_prints_the_recipe_and_our_step_for_each_folder(tmp_path: Path, command: Command) -> None:
    folder = write_texts(tmp_path / "texts")
    result = command("benchmarks.corpus", "clean", "--texts", folder, "--count", 12, "--rounds", 1)
    assert result.returncode == 0, result.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines() if "texts " in line]
    table = {row[1]: row for row in rows}
    assert table["plain recipe"][4] == table["corpus.clean"][4] == "100.00 %"
    assert table["plain recipe"][3] == table["corpus.clean, 2 workers"][3] != "12"
