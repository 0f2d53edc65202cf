"""Settings on the command line: `--config FILE`, flags that are short for a key, and `section.key=value` anywhere."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest

from common import cli
from common.errors import ConfigError
from common.settings import Settings

CONFIG = """
run: results/x
urls: [urls.txt]
clean: {language: de, min_characters: 10}
models:
  tiny:
    model: {n_layer: 2, n_head: 4, n_embd: 8}
    train: {iterations: 10}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    return tmp_path


def step() -> argparse.ArgumentParser:
    parser = cli.parser("corpus.clean", "A step.")
    parser.add_argument("--output", type=cli.output_file)
    parser.add_argument("--input", type=cli.shards, nargs="+")
    parser.add_argument("--explain", action="store_true")
    cli.add_key_flag(parser, "--language", "clean.language", metavar="CODE")
    cli.add_key_flag(parser, "--gopher", "clean.gopher.enabled", nargs=0)
    cli.add_settings(parser, "clean")
    return parser


def parse(*words: str) -> tuple[argparse.Namespace, Settings]:
    arguments = step().parse_args(words)
    return arguments, cli.read_settings(arguments)


def test_without_a_file_every_key_has_its_default() -> None:
    _, settings = parse()
    assert settings.clean.language == "en" and settings.clean.min_characters == 512


def test_an_override_wins_over_a_flag_and_a_flag_over_the_file() -> None:
    assert parse("--config", "config.yaml")[1].clean.language == "de"
    assert parse("--language", "fr", "--config", "config.yaml")[1].clean.language == "fr"
    words = ("clean.language=it", "--config", "config.yaml", "--language", "fr")
    settings = parse(*words)[1]
    assert settings.clean.language == "it" and settings.clean.min_characters == 10


@pytest.mark.parametrize("position", range(5))
def test_an_override_may_stand_anywhere_among_the_arguments(position: int) -> None:
    words = [["--config", "config.yaml"], ["--explain"], ["--output", "o"], ["--language", "fr"]]
    words.insert(position, ["clean.min_characters=7"])
    arguments, settings = parse(*(word for option in words for word in option))
    assert settings.clean.min_characters == 7 and settings.clean.language == "fr"
    assert arguments.explain and arguments.output == Path("o")


def test_a_flag_without_a_value_turns_a_key_on() -> None:
    assert parse("--gopher")[1].clean.gopher.enabled and not parse()[1].clean.gopher.enabled


def test_the_value_of_an_option_is_never_an_override() -> None:
    arguments, settings = parse("--output", "clean.language=de", "clean.language=fr")
    assert arguments.output == Path("clean.language=de") and settings.clean.language == "fr"
    arguments, settings = parse("--output", "clean.language=de", "clean.language=de")
    assert arguments.output == Path("clean.language=de") and settings.clean.language == "de"


def test_a_file_that_exists_is_never_an_override() -> None:
    Path("clean.language=de").write_text("")
    arguments, settings = parse("--input", "a", "clean.language=de")
    assert arguments.input == ["a", "clean.language=de"] and settings.clean.language == "en"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["claen.language=de"], r"unknown key 'claen' \(did you mean 'clean'\?\)"),
        (["clean.langauge=de"], r"unknown key 'clean\.langauge' \(did you mean 'language'\?\)"),
        (["clean.min_characters=-1"], r"clean\.min_characters: .*\(given: -1\)"),
        (["--language", "xx"], r"clean\.language: 'xx' is not the code of a language"),
    ],
)
def test_a_wrong_key_or_value_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse(*words)
    assert "\n" not in str(error.value)


def test_a_word_that_is_no_override_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("clean.language")
    assert "unrecognized arguments: clean.language" in capsys.readouterr().err


def test_a_command_without_settings_takes_no_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser("report", "A command.").parse_args(["clean.language=de"])
    assert "unrecognized arguments: clean.language=de" in capsys.readouterr().err


def test_the_help_of_a_flag_is_the_description_of_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step().parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--language CODE clean.language: ISO 639-1 code" in text


def verbs(words: Sequence[str]) -> argparse.Namespace:
    """A command with the verbs `count`, which has settings, and `show`, which has none."""
    parser = cli.parser("corpus.dedup", "A command with verbs.")
    choices = parser.add_subparsers(dest="verb", required=True)
    count = choices.add_parser("count")
    count.add_argument("--output", type=cli.output_file)
    cli.add_key_flag(count, "--threshold", "dedup.threshold", type=float)
    cli.add_settings(count, "dedup")
    choices.add_parser("show")
    return parser.parse_args(words)


def test_a_verb_takes_settings_like_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = verbs(["count", "dedup.bands=5", "--threshold", "0.5", "--config", "config.yaml", "dedup.rows=3"])
    dedup = cli.read_settings(arguments).dedup
    assert (arguments.verb, dedup.bands, dedup.rows, dedup.threshold) == ("count", 5, 3, 0.5)
    with pytest.raises(ConfigError, match=r"unknown key 'dedupe' \(did you mean 'dedup'\?\)"):
        cli.read_settings(verbs(["count", "dedupe.bands=5"]))
    with pytest.raises(SystemExit):
        verbs(["show", "dedup.bands=5"])
    assert "unrecognized arguments: dedup.bands=5" in capsys.readouterr().err


def model(*words: str) -> Settings:
    parser = cli.parser("training.train", "A command for one model.")
    cli.add_model_settings(parser)
    return cli.read_settings(parser.parse_args(["--config", "config.yaml", *words]))


def test_overrides_of_a_model_are_keys_of_that_model() -> None:
    settings = model("train.lr=3e-4", "--model", "tiny", "model.n_layer=5")
    assert settings.models["tiny"].train.lr == 3e-4 and settings.models["tiny"].model.n_layer == 5
    with pytest.raises(ConfigError, match=r"unknown key 'models\.tiny\.trian' \(did you mean 'train'\?\)"):
        model("--model", "tiny", "trian.lr=1")
    with pytest.raises(ConfigError, match=r"no model 'tinny' under models \(did you mean 'tiny'\?\)"):
        model("--model", "tinny")
