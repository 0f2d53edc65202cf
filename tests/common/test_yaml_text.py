from pathlib import Path

import pytest
import yaml

from common.config import load_settings, settings_text
from common.errors import ConfigError
from common.yaml_text import read_yaml, with_overrides

# What YAML 1.1 takes for booleans, numbers in base 8 and 60, dates and special floats.
MISREAD = (
    "no",
    "on",
    "off",
    "yes",
    "y",
    "true",
    "1:30",
    "010",
    "0o7",
    "2024-01-01",
    "1e3",
    "1_000",
    ".inf",
    "0x1F",
    "=",
)


@pytest.mark.parametrize("text", MISREAD)
def test_text_stays_as_it_was_written_in_files_and_in_overrides(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {text}\nurls: [{text}]\nblacklist: {{extra_domains: [{text}]}}\ngenerate:\n  prompt: {text}\n"
        f"scrape: {{resolve: {{{text}: {text}}}}}\n"
    )
    settings = load_settings(path, [f"scrape.contact={text}"])
    assert settings.run == Path(text) and settings.urls == settings.blacklist.extra_domains == [text]
    assert settings.generate.prompt == settings.scrape.contact == text and settings.scrape.resolve == {text: text}
    (tmp_path / "resolved.yaml").write_text(settings_text(settings))
    assert load_settings(tmp_path / "resolved.yaml") == settings
    assert with_overrides({}, [f"a.b={text}"]) == {"a": {"b": text}}


@pytest.mark.parametrize("language", ["no", "en", ""])
def test_a_language_is_a_language(tmp_path: Path, language: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"run: x\nurls: [u]\nclean: {{language: {language or chr(34) * 2}}}\n")
    assert load_settings(path).clean.language == language
    assert load_settings(path, ["clean.language=no"]).clean.language == "no"


def test_numbers_booleans_and_nothing_are_read_where_a_key_asks_for_them(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        """
run: x
urls: [u]
shards: 08
site: ~
scrape: {archive: yes, obey_robots: Off, max_bytes: 3.2e6, retries: 0}
blacklist: {min_score: -2}
dedup: {threshold: 8.5e-1}
models:
  a: &a
    model: &m {n_layer: 1, n_head: 1, n_embd: 8}
    train: {iterations: 1_000, compile: null, betas: [.5, 0.9]}
    watch: {spike: 0.5}
  b: {<<: *a, model: {<<: *m, n_layer: 2}}
"""
    )
    settings = load_settings(path)
    assert settings.shards == 8 and settings.site is None and settings.blacklist.min_score == -2
    assert (settings.scrape.archive, settings.scrape.obey_robots, settings.scrape.max_bytes) == (True, False, 3_200_000)
    assert settings.dedup.threshold == 0.85
    run = settings.models["a"]
    assert run.train.iterations == 1000 and run.train.compile == "auto" and run.train.betas == (0.5, 0.9)
    assert run.watch.spike == 0.5 and settings.models["b"].model.n_layer == 2
    changed = load_settings(path, ["model.n_layer=5"], model="a")
    assert (changed.models["a"].model.n_layer, changed.models["b"].model.n_layer) == (5, 2), "an alias is not shared"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"run: x\nscrape: {retries: 1, retries: 2}", ":2: not valid YAML: key 'retries' is given twice"),
        (b"a: 1\nb: {c: 1}\n'a': 2", ":3: not valid YAML: key 'a' is given twice"),
        (b"a:\n\tb: 1", ":2: not valid YAML"),
        (b"a: [1,\n b: }", ":2: not valid YAML"),
        (b"a: \x00", "not valid YAML"),
        (b"a: *b", ":1: not valid YAML"),
        (b"? [a]\n: b", "not valid YAML"),
        (b"a: !!python/object:os.system x", "not valid YAML"),
        (b"a: !!int x", "not valid YAML"),
        (b"a: 1\n---\nb: 2", "not valid YAML"),
        (b"a: 1\n# caf\xe9", ":2: not UTF-8; save the file as UTF-8"),
        ("a: é".encode("utf-16"), ":1: not UTF-8"),
        (b"[" * 5000, "not valid YAML"),
        (b"# nothing", "empty configuration file"),
        (b"- a", "must be a mapping of keys, not list"),
        (b"no", "must be a mapping of keys, not str"),
    ],
)
def test_what_is_no_configuration_is_one_line_with_its_place(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert str(error.value).startswith(str(path)) and message in str(error.value) and "\n" not in str(error.value)


def test_a_folder_an_absent_file_and_an_override_that_is_no_yaml_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory; give a YAML file"):
        read_yaml(tmp_path)
    with pytest.raises(ConfigError, match="no such configuration file"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"run": "x", "urls": ["u"]}))
    for override, message in (("generate.prompt=a: b: c", "not valid YAML"), ("=1", "must read"), ("run.x=1", "run: ")):
        with pytest.raises(ConfigError, match=message):
            load_settings(tmp_path / "config.yaml", [override])


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xef\xbb\xbfrun: x\nurls: [u]\n")
    assert load_settings(tmp_path / "config.yaml").run == Path("x")
