from pathlib import Path

import pytest

from common.config import load_settings, read_yaml, settings_text, with_overrides
from common.errors import ConfigError

# What YAML 1.1 takes for booleans, numbers in base 8 and 60, dates and special floats.
MISREAD = ("no", "true", "1:30", "010", "2024-01-01", "1e3", "1_000", ".inf", "=")


@pytest.mark.parametrize("text", MISREAD)
def test_text_stays_as_it_was_written_in_files_and_in_overrides(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"run: {text}\nurls: [{text}]\nscrape: {{resolve: {{{text}: {text}}}}}\n")
    settings = load_settings(path, [f"generate.prompt={text}"])
    assert settings.run == Path(text) and settings.urls == [text]
    assert settings.generate.prompt == text and settings.scrape.resolve == {text: text}
    (tmp_path / "resolved.yaml").write_text(settings_text(settings))
    assert load_settings(tmp_path / "resolved.yaml") == settings
    assert with_overrides({}, [f"a.b={text}"]) == {"a": {"b": text}}


def test_numbers_booleans_and_nothing_are_read_where_a_key_asks_for_them(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        """\ufeff
run: x
urls: [u]
shards: 08
site: ~
scrape: {archive: yes, obey_robots: Off, max_bytes: 3_200_000}
models:
  a: &a {model: &m {n_layer: 1, n_head: 1, n_embd: 8}, train: {iterations: 1_000, betas: [.5, 0.9]}}
  b: {<<: *a, model: {<<: *m, n_layer: 2}}
"""
    )
    settings = load_settings(path, ["model.n_layer=5"], model="a")
    assert settings.shards == 8 and settings.site is None
    assert (settings.scrape.archive, settings.scrape.obey_robots, settings.scrape.max_bytes) == (True, False, 3_200_000)
    assert settings.models["a"].train.iterations == 1000 and settings.models["a"].train.betas == (0.5, 0.9)
    assert [settings.models[name].model.n_layer for name in "ab"] == [5, 2], "an alias is not shared"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"run: x\nscrape: {retries: 1, retries: 2}", ":2: .*'retries'"),
        (b"a: 1\nb: {c: 1}\n'a': 2", ":3: .*'a'"),
        (b"a:\n\tb: 1", ":2: "),
        (b"a: *b", ":1: "),
        (b"a: 1\n# caf\xe9", ":2: .*UTF-8"),
        (b"# nothing", "empty"),
        (b"- a", "list"),
    ],
)
def test_what_is_no_configuration_is_one_line_with_its_place(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=rf"config\.yaml.*{said}") as error:
        read_yaml(tmp_path / "config.yaml")
    assert "\n" not in str(error.value)
