"""The published sizes of GPT-2 and of larger models of its kind, by the names that configurations give them."""

from collections.abc import Iterable
from typing import Any

from common.config import validate, with_model_overrides
from common.errors import InputError
from common.settings import Settings, closest

# name: (n_layer, n_embd, n_head, seq_len, global batch size)
_SIZES = {
    "gpt2_124m": (12, 768, 12, 1024, 512),  # Radford et al. 2019, the first four; 512: Megatron-LM's recipe
    "gpt2_345m": (24, 1024, 16, 1024, 512),  # 354,823,168 parameters, also called 355M
    "gpt2_774m": (36, 1280, 20, 1024, 512),
    "gpt2_1_5b": (48, 1600, 25, 1024, 512),
    "gpt2_7b": (32, 4096, 32, 2048, 1024),
    "gpt2_22b": (48, 6144, 64, 2048, 1024),  # Korthikanti et al. 2022, table 3
    "gpt2_175b": (96, 12288, 96, 2048, 1536),  # Brown et al. 2020; the batch of Narayanan et al. 2021
}
_ITERATIONS = 320_000  # x 512 x 1,024 = 168 B tokens: Megatron-LM's recipe for 345M


def published_settings(name: str, overrides: Iterable[str]) -> Settings:
    """Settings with one model, a published size, changed by overrides `section.key=value`.

    Raises InputError for an unknown name, and ConfigError for an override that does not fit.
    """
    if name not in _SIZES:
        raise InputError(
            f"--model {name}: no published size has this name{closest(name, _SIZES)}; known: {', '.join(_SIZES)}; "
            "--config FILE names a configuration with other models"
        )
    layers, width, heads, seq_len, batch = _SIZES[name]
    experiment: dict[str, Any] = {
        "model": {"n_layer": layers, "n_embd": width, "n_head": heads, "seq_len": seq_len},
        "train": {"iterations": _ITERATIONS, "global_batch_size": batch},
    }
    raw = {"run": "results", "urls": ["-"], "models": {name: experiment}}
    return validate(with_model_overrides(raw, overrides, name), "command line")
