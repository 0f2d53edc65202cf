from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import describe, load_settings, read_yaml, settings_text, with_overrides, write_settings
from common.errors import ConfigError
from common.settings import Experiment, Settings
from tests.conftest import ROOT

SMALL = """
run: results/x
urls: [urls.txt]
models:
  tiny:
    model: {n_layer: 2, n_head: 4, n_embd: 8}
    train: {iterations: 10}
"""


def written(folder: Path, text: str) -> Path:
    (folder / "config.yaml").write_text(text)
    return folder / "config.yaml"


# A change of SMALL, or of its model where it begins with `tiny`; what the message names.
WRONG = [
    ("scrpe: {}", "'scrpe' (did you mean 'scrape'?)"),
    ("scrape: {contcat: x}", "'scrape.contcat' (did you mean 'contact'?)"),
    ("tiny: {model: {n_layer: 2, n_head: 4, n_embd: 8, nlayer: 3}}", "'n_layer'?"),
    ("tiny: {model: {n_layers: 2, n_head: 4, n_embd: 8}}", "'models.tiny.model.n_layers' (did you mean 'n_layer'?)"),
    ("tiny: {train: {iterations: 1, betas: [0.9]}}", "models.tiny.train.betas: has too few values"),
    ("tiny: {lr: 0.1}", "'models.tiny.lr'; docs/config.md lists"),
    ("tiny: {parallel: 'yes'}", "models.tiny.parallel: needs keys with values"),
    ("tiny: {log: {wandb: true}}", "models.tiny.log.wandb: needs a name, not true"),
    ("dedup: {threshold: high}", "dedup.threshold"),
    ("clean: {language: [[en]]}", "clean.language: "),
    ("clean: {min_characters: }", "clean.min_characters: "),
    ("shards: 0", "shards: "),
    ("decontaminate: {min_words: 14}", "max_words 13"),
    ("evaluate: {max_samples: 9}", "max_samples 9 needs tasks"),
    ("train_models: [tinny]", "'tinny' under models (did you mean 'tiny'?)"),
    ("tiny: {model: {n_layer: 1, n_head: 3, n_embd: 8}}", "n_head"),
    ("tiny: {parallel: {tensor: 3}}", "parallel.tensor 3 does not divide model.n_head 4"),
    ("tiny: {train: {iterations: 1, micro_batch_size: 3, global_batch_size: 8}}", "set it to 6 or 9"),
    ("tiny: {train: {iterations: 1, micro_batch_size: 2, accumulation: 3, global_batch_size: 8}}", "= 6; set it"),
    ("tiny: {train: {iterations: 1, accumulation: 3, global_batch_size: 2}}", "set it to 3"),
    ("tiny: {parallel: {pipeline: 2, virtual_stages: 2, schedule: interleaved_1f1b}}", "model.n_layer is 2"),
    ("tiny: {parallel: {schedule: interleaved_1f1b}}", "pipeline 2 or more"),
    ("tiny: {parallel: {pipeline: 2, virtual_stages: 1, schedule: interleaved_1f1b}}", "virtual_stages"),
    ("train_tokenizer: {vocab_size: 256}", "train_tokenizer.vocab_size: 257"),
    ("train_tokenizer: {vocab_size: 300}", "models.tiny.model.vocab_size is 50257"),
    ("models: {'a b': {model: {n_layer: 1, n_head: 4, n_embd: 8}, train: {iterations: 1}}}", "'a b'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_wrong_key_is_named_in_one_line(tmp_path: Path, change: str, said: str) -> None:
    config, changed = yaml.safe_load(SMALL), yaml.safe_load(change)
    config["models"]["tiny"] |= changed.pop("tiny", {})
    with pytest.raises(ConfigError) as error:
        load_settings(written(tmp_path, yaml.safe_dump(config | changed)))
    assert said in str(error.value) and "\n" not in str(error.value)
    assert str(tmp_path / "config.yaml") in str(error.value)


def test_the_resolved_configuration_reads_back_as_itself_and_names_a_trained_vocabulary(tmp_path: Path) -> None:
    for path in [
        ROOT / "config.yaml",
        written(tmp_path, SMALL + "train_models: []\ntrain_tokenizer: {vocab_size: 300}"),
    ]:
        settings = load_settings(path)
        write_settings(settings, tmp_path / "resolved.yaml")
        assert load_settings(tmp_path / "resolved.yaml") == settings
    assert settings.tokenize.encoder_json == Path("results/x/tokenizer/encoder.json")
    assert settings.tokenize.vocab_bpe == Path("results/x/tokenizer/vocab.bpe")
    assert load_settings(written(tmp_path, SMALL)).tokenize.encoder_json is None


def test_a_resolved_file_of_a_version_with_other_keys_is_read_unless_such_a_key_was_given(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, SMALL))
    text = settings_text(settings)
    older, newer = text.replace("  fold_whitespace: false\n", ""), text.replace("clean:\n", "clean:\n  gone: 3\n")
    assert older != text != newer
    for other in (older, newer):
        assert load_settings(written(tmp_path, other)) == settings
    for other in (newer.replace('default: ["run"', 'default: ["clean.gone", "run"'), newer.rpartition("#")[0]):
        with pytest.raises(ConfigError, match=r"unknown key 'clean\.gone'"):
            load_settings(written(tmp_path, other))
    with pytest.raises(ConfigError, match=r"unknown key 'clean\.gone'"):
        load_settings(written(tmp_path, text), ["clean.gone=3"])


def test_all_trains_the_only_model_unless_the_configuration_says_otherwise() -> None:
    model = {"model": {"n_layer": 1, "n_head": 1, "n_embd": 8}, "train": {"iterations": 1}}
    one, two = {"a": model}, {"a": model, "b": model}
    for models, chosen, trained in (
        ({}, {}, []),
        (one, {}, ["a"]),
        (one, {"train_models": []}, []),
        (two, {}, []),
        (two, {"train_models": ["b"]}, ["b"]),
    ):
        raw = {"run": "x", "urls": ["urls.txt"], "models": models, **chosen}
        assert Settings.model_validate(raw).models_of_all == trained, raw


def test_every_configuration_we_ship_is_valid_and_the_reference_page_is_current() -> None:
    for path in [ROOT / "config.yaml", *sorted((ROOT / "configs").glob("*.yaml"))]:
        settings = load_settings(path)
        assert {*settings.models_of_all, "gpt2_124m"} <= settings.models.keys()
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert describe().rstrip() in page, "run: python -m common.config > docs/config.md"


def test_the_schema_for_editors_takes_what_we_ship_and_no_wrong_key() -> None:
    check = jsonschema.Draft202012Validator(Settings.model_json_schema())
    shipped = [yaml.safe_load(path.read_text()) for path in (ROOT / "config.yaml", *(ROOT / "configs").glob("*.yaml"))]
    model = {"model": {"n_layer": 1, "n_head": 1, "n_embd": 8}, "train": {"iterations": 1}, "parallel": "auto"}
    for right in [*shipped, {"run": "x", "base": "y", "models": {"a": model}}]:
        check.validate(right)
    wrong = [{"run": "x", "scrpe": {}}, {"run": "x", "shards": 0}, {"run": "x", "models": {"a": {**model, "b": 1}}}]
    assert [raw for raw in wrong if check.is_valid(raw)] == []


def batch(data: int, **given: int) -> tuple[int, int, int]:
    model = {"n_layer": 1, "n_head": 1, "n_embd": 8}
    run = Experiment.model_validate({"model": model, "parallel": {"data": data}, "train": {"iterations": 1, **given}})
    assert Experiment.model_validate(run.model_dump()) == run
    return run.train.micro_batch_size, run.accumulation, run.train.global_batch_size


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9))
def test_two_of_the_batch_sizes_give_the_third(data: int, micro: int, steps: int) -> None:
    expected = (micro, steps, micro * steps * data)
    assert batch(data, micro_batch_size=micro, accumulation=steps) == expected
    assert batch(data, micro_batch_size=micro, global_batch_size=expected[2]) == expected
    assert batch(data, accumulation=steps, global_batch_size=expected[2]) == expected


def test_sizes_that_are_not_given_have_defaults() -> None:
    assert batch(1) == (4, 1, 4) and batch(3, micro_batch_size=2) == (2, 1, 6)
    assert batch(2, global_batch_size=24) == (4, 3, 24) and batch(1, accumulation=5) == (4, 5, 20)
    assert batch(1, global_batch_size=6) == (3, 2, 6) and batch(2, global_batch_size=14) == (1, 7, 14)


# What YAML 1.1 takes for booleans, numbers in base 8 and 60, dates and special floats.
MISREAD = ("no", "true", "1:30", "010", "2024-01-01", "1e3", "1_000", ".inf", "=")


@pytest.mark.parametrize("text", MISREAD)
def test_text_stays_as_it_was_written_in_files_and_in_overrides(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, f"run: {text}\nurls: [{text}]\nscrape: {{resolve: {{{text}: {text}}}}}\n")
    settings = load_settings(path, [f"generate.prompt={text}"])
    assert settings.run == Path(text) and settings.urls == [text]
    assert settings.generate.prompt == text and settings.scrape.resolve == {text: text}
    assert load_settings(written(tmp_path, settings_text(settings))) == settings
    assert with_overrides({}, [f"a.b={text}"]) == {"a": {"b": text}}


def test_numbers_booleans_and_nothing_are_read_where_a_key_asks_for_them(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\ufeff
run: x
urls: [u]
shards: 08
site: ~
scrape: {archive: yes, obey_robots: Off, max_bytes: 3_200_000}
models:
  a: &a {model: &m {n_layer: 1, n_head: 1, n_embd: 8}, train: {iterations: 1_000, betas: [.5, 0.9]}}
  b: {<<: *a, model: {<<: *m, n_layer: 2}}
""",
    )
    settings = load_settings(path, ["model.n_layer=5", "clean.language="], model="a")
    assert settings.clean.language == "" and settings.clean.languages == []
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
