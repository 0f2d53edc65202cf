from pathlib import Path

import pytest

from common.config import write_settings
from common.errors import InputError
from common.settings import Settings
from workflow.runs import load_run


def test_a_run_that_was_moved_has_its_own_files_where_it_lies_now(tmp_path: Path) -> None:
    made = {"run": "results/x", "urls": ["urls.txt"], "train_tokenizer": {"vocab_size": 300}}
    write_settings(Settings.model_validate(made), tmp_path / "config.yaml")
    settings = load_run(tmp_path)
    assert settings.dataset_prefix == tmp_path / "dataset/corpus_text_document"
    assert settings.tokenize.encoder_json == tmp_path / "tokenizer/encoder.json"
    assert settings.tokenize.vocab_bpe == tmp_path / "tokenizer/vocab.bpe"
    with pytest.raises(InputError, match=r"none/config\.yaml: no such file; name the folder of a run"):
        load_run(tmp_path / "none")
