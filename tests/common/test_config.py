from pathlib import Path

import pytest
import yaml

from common.config import describe, load_settings, write_settings
from common.errors import ConfigError
from common.settings import Experiment
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
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("scrpe: {}", "unknown key 'scrpe' (did you mean 'scrape'?)"),
        ("scrape: {contcat: x}", "unknown key 'scrape.contcat' (did you mean 'contact'?)"),
        ("dedup: {threshold: high}", "dedup.threshold: must be a number"),
        ("train_models: [tinny]", "no model 'tinny' under models (did you mean 'tiny'?)"),
        ("shards: 0", "shards: must be greater than 0 (given: 0)"),
        (
            "generate: {samples: 5, temperature: 0}",
            "with temperature 0 all texts are the same; set samples to 1",
        ),
        ("models: {a: {model: {n_layer: 1, n_head: 3, n_embd: 8}, train: {iterations: 1}}}", "not divisible by n_head"),
        (
            "models: {a: {model: {n_layer: 1, n_head: 4, n_embd: 8}, parallel: {tensor: 3}, train: {iterations: 1}}}",
            "parallel.tensor 3 does not divide model.n_head 4",
        ),
        ("models: {a: {model: {n_layer: 1, n_head: 4, n_embd: 8, nlayer: 3}, train: {iterations: 1}}}", "'n_layer'?"),
        (
            "models: {a: {model: {n_layer: 1, n_head: 4, n_embd: 8},"
            " train: {iterations: 1, micro_batch_size: 3, global_batch_size: 8}}}",
            "global_batch_size 8 is not a multiple of train.micro_batch_size 3 x parallel.data 1 = 3; set it to 6 or 9",
        ),
        (
            "models: {a: {model: {n_layer: 1, n_head: 4, n_embd: 8},"
            " train: {iterations: 1, micro_batch_size: 2, accumulation: 3, global_batch_size: 8}}}",
            "global_batch_size 8 is not train.micro_batch_size 2 x train.accumulation 3 x parallel.data 1 = 6; set it",
        ),
        (
            "models: {a: {model: {n_layer: 1, n_head: 4, n_embd: 8},"
            " train: {iterations: 1, accumulation: 3, global_batch_size: 2}}}",
            "global_batch_size 2 is not a multiple of train.accumulation 3 x parallel.data 1 = 3; set it to 3",
        ),
        (
            "models: {a: {model: {n_layer: 3, n_head: 4, n_embd: 8},"
            " parallel: {pipeline: 2, virtual_stages: 2, schedule: interleaved_1f1b}, train: {iterations: 1}}}",
            "parallel.pipeline 2 x parallel.virtual_stages 2 = 4 stages, but model.n_layer is 3",
        ),
        (
            "models: {a: {model: {n_layer: 4, n_head: 4, n_embd: 8}, parallel: {schedule: interleaved_1f1b},"
            " train: {iterations: 1}}}",
            "interleaved_1f1b needs pipeline 2 or more",
        ),
        (
            "models: {a: {model: {n_layer: 4, n_head: 4, n_embd: 8},"
            " parallel: {pipeline: 2, virtual_stages: 2, schedule: interleaved_1f1b},"
            " train: {iterations: 1, accumulation: 5}}}",
            "cannot run a step with train.accumulation 5; set train.accumulation to 6 and train.global",
        ),
        (
            "models: {a: {model: {n_layer: 4, n_head: 4, n_embd: 8, seq_len: 30},"
            " parallel: {tensor: 4, sequence_parallel: true}, train: {iterations: 1}}}",
            "parallel.tensor 4 does not divide model.seq_len 30",
        ),
        (
            "models: {a: {model: {n_layer: 4, n_head: 4, n_embd: 8}, parallel: {offload: true},"
            " train: {iterations: 1}}}",
            "offload needs zero_stage 1, 2 or 3 and data 2 or more",
        ),
        ("train_tokenizer: {vocab_size: 256}", "train_tokenizer.vocab_size: 257 entries at least"),
        (
            "{train_tokenizer: {vocab_size: 300}, train_models: [tiny]}",
            "models.tiny.model.vocab_size is 50257, train_tokenizer.vocab_size 300",
        ),
        (
            "{train_tokenizer: {vocab_size: 300}, tokenize: {encoder_json: a, vocab_bpe: b}}",
            "tokenize: encoder_json and train_tokenizer.vocab_size name two vocabularies",
        ),
        ("models: {'a b': {model: {n_layer: 1, n_head: 4, n_embd: 8}, train: {iterations: 1}}}", "'a b' must be"),
    ],
)
def test_a_wrong_key_is_named_in_one_line(tmp_path: Path, change: str, message: str) -> None:
    config = {**yaml.safe_load(SMALL), **yaml.safe_load(change)}
    with pytest.raises(ConfigError) as error:
        load_settings(written(tmp_path, yaml.safe_dump(config)))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(tmp_path / "config.yaml") in str(error.value)


@pytest.mark.parametrize(("text", "message"), [("", "empty"), ("a: [", "not valid YAML"), ("- a", "must be a mapping")])
def test_a_file_that_is_no_configuration_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(written(tmp_path, text))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_settings(tmp_path / "none.yaml")


def test_overrides_reach_the_named_model_and_are_checked(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL)
    settings = load_settings(path, ["train.lr=3e-4", "model.n_layer=5"], model="tiny")
    assert settings.models["tiny"].train.lr == 3e-4
    assert settings.models["tiny"].model.n_layer == 5
    with pytest.raises(ConfigError, match=r"unknown key 'models\.tiny\.train\.lrr'"):
        load_settings(path, ["train.lrr=1"], model="tiny")
    with pytest.raises(ConfigError, match=r"must read section\.key=value"):
        load_settings(path, ["train.lr"], model="tiny")
    with pytest.raises(ConfigError, match=r"no model 'small' under models.*; it has tiny$"):
        load_settings(path, model="small")
    settings = load_settings(path, ["run=elsewhere", "cluster.cpus_per_task=2"], model="tiny")
    assert (settings.run, settings.cluster.cpus_per_task) == (Path("elsewhere"), 2)
    with pytest.raises(
        ConfigError, match=r"train\.betas: must be two numbers, such as \[0\.9, 0\.999\] \(given: 0\.9\)"
    ):
        load_settings(path, ["train.betas=0.9"], model="tiny")


def test_the_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    settings = load_settings(ROOT / "config.yaml")
    write_settings(settings, tmp_path / "resolved.yaml")
    assert load_settings(tmp_path / "resolved.yaml") == settings


def test_a_trained_vocabulary_is_named_where_every_step_looks_for_it(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, SMALL + "train_tokenizer: {vocab_size: 300}"))
    assert settings.tokenize.encoder_json == Path("results/x/tokenizer/encoder.json")
    assert settings.tokenize.vocab_bpe == Path("results/x/tokenizer/vocab.bpe")
    write_settings(settings, tmp_path / "resolved.yaml")
    assert load_settings(tmp_path / "resolved.yaml") == settings
    assert load_settings(written(tmp_path, SMALL)).tokenize.encoder_json is None


@pytest.mark.parametrize("path", [ROOT / "config.yaml", *sorted((ROOT / "configs").glob("*.yaml"))])
def test_every_configuration_we_ship_is_valid(path: Path) -> None:
    assert {"gpt2_124m", "gpt2_345m", "gpt2_7b"} <= load_settings(path).models.keys()


def test_the_reference_page_is_the_one_the_settings_give() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert describe().rstrip() in page, "run: python -m common.config > docs/config.md"


@pytest.mark.parametrize(
    ("given", "data", "expected"),
    [
        ({}, 1, (4, 1, 4)),
        ({"global_batch_size": 24}, 2, (4, 3, 24)),
        ({"micro_batch_size": 2}, 3, (2, 1, 6)),
        ({"accumulation": 5}, 1, (4, 5, 20)),
        ({"micro_batch_size": 2, "accumulation": 3}, 2, (2, 3, 12)),
        ({"micro_batch_size": 2, "global_batch_size": 12}, 2, (2, 3, 12)),
        ({"accumulation": 3, "global_batch_size": 12}, 2, (2, 3, 12)),
        ({"global_batch_size": 6}, 1, (3, 2, 6)),
        ({"global_batch_size": 14}, 2, (1, 7, 14)),
        ({"micro_batch_size": 2, "accumulation": 3, "global_batch_size": 12}, 2, (2, 3, 12)),
    ],
)
def test_two_of_the_batch_sizes_give_the_third(
    given: dict[str, int], data: int, expected: tuple[int, int, int]
) -> None:
    model = {"n_layer": 1, "n_head": 1, "n_embd": 8}
    run = Experiment.model_validate({"model": model, "parallel": {"data": data}, "train": {"iterations": 1, **given}})
    assert (run.train.micro_batch_size, run.accumulation, run.train.global_batch_size) == expected
    assert Experiment.model_validate(run.model_dump()) == run
