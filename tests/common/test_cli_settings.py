"""Settings on the command line: `--config FILE`, and `section.key=value` anywhere."""

from pathlib import Path

import pytest

from common import cli
from common.errors import ConfigError
from common.settings import Settings
from tests.common.test_config import SMALL


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(f"{SMALL}\nclean: {{language: de, min_characters: 10}}\n")


def parse(*words: str) -> Settings:
    """A command with the verbs `count`, which has settings, and `show`, which has none."""
    parser = cli.parser("corpus.clean", "A step.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("show")
    count = verbs.add_parser("count")
    cli.add_settings(count, "clean")
    return cli.read_settings(parser.parse_args(words))


def test_an_override_wins_over_the_file_and_the_file_over_the_default() -> None:
    config = ("--config", "config.yaml")
    assert parse("count").clean.language == "en" and not parse("count").clean.filters
    assert parse("count", *config).clean.language == "de"
    clean = parse("count", "clean.language=it", *config, "clean.filters=[gopher]").clean
    assert (clean.language, clean.min_characters, clean.filters) == ("it", 10, ["gopher"])


def test_a_wrong_key_or_value_is_named_with_the_closest_one(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["claen.language=de"], "'claen' .*'clean'"),
        (["clean.langauge=de"], r"'clean\.langauge' .*'language'"),
        (["clean.min_characters=-1"], r"clean\.min_characters: .*-1"),
        (["clean.language=xx"], r"clean\.language: 'xx'"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse("count", *words)
    for words in (["count", "clean.language"], ["show", "clean.language=de"]):
        with pytest.raises(SystemExit):
            parse(*words)
        assert words[1] in capsys.readouterr().err
