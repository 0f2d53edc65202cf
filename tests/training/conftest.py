"""Fixtures of the training's tests."""

from pathlib import Path

import pytest

from tests.conftest import Once


@pytest.fixture(scope="session")
def gpt2_folder(once: Once) -> Path:
    """A Hugging Face folder with a random model of 16 positions, `reference.tiny_model`, and the GPT-2 vocabulary."""
    from common.tokenizer import Tokenizer
    from tests.convert.helpers import write_pretrained
    from tests.training.reference import tiny_model

    def build(folder: Path) -> None:
        model = tiny_model(50257)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        write_pretrained(folder, weights, model.settings, Tokenizer())

    return once("gpt2_folder", build)
