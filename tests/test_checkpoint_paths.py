"""Every command takes the same paths for a checkpoint, and reads the one that each path means."""

from pathlib import Path
from typing import Any

import pytest

from common.commands import COMMANDS
from convert.merge_mp import merge
from tests.conftest import Once
from tests.helpers import called
from tests.training.helpers import copy_run
from training import checkpoint

# each is followed by the checkpoint's path
ASKED: dict[str, tuple[object, ...]] = {
    "training.evaluate": ("--data", "DATA", "--max-tokens", 16, "--checkpoint"),
    "training.generate": ("--prompt", "x", "--allow-no-tokenizer", "--checkpoint"),
    "convert.merge_mp": ("--output", "NEW", "--dry-run", "--checkpoint"),
    "convert.verify": (),
    "convert.to_megatron": ("--output", "NEW", "--tp", 1, "--format", "v3", "--checkpoint"),
    "convert.to_gguf": ("--output", "NEW", "--checkpoint"),
    "convert.from_megatron": (
        *("--config", "RUN/config.yaml", "--model", "tiny", "run=NEW"),
        *("data=[{prefix: DATA, weight: 1}]", "--checkpoint"),
    ),
}
MEANT = {
    "models/tiny": "iter_0000020",
    "models/tiny/latest": "iter_0000020",
    "models/tiny/best": "iter_0000010",
    "models/tiny/iter_0000010": "iter_0000010",
    "merged": None,
}


@pytest.fixture(scope="module")
def run(once: Once, tiny_run: Path) -> Path:
    """A run with checkpoints 10, the best, and 20, the newest; and its merged folder."""

    def build(folder: Path) -> None:
        copy_run(tiny_run, folder)
        (folder / "models/tiny/best").write_text("iter_0000010\n")
        merge(folder / "models/tiny", folder / "merged")

    return once("checkpoint-paths", build)


@pytest.mark.parametrize("command", ASKED)
def test_every_command_reads_the_checkpoint_that_a_path_means(
    command: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, found = checkpoint.resolve, set()

    def spy(path: Path) -> Any:
        manifest = resolve(path)
        if manifest.path.is_relative_to(run):  # not one that the command wrote
            found.add(manifest.path.name)
        return manifest

    monkeypatch.setattr(checkpoint, "resolve", spy)
    for number, (path, meant) in enumerate(MEANT.items()):
        found.clear()
        names = {"NEW": tmp_path / str(number), "RUN": run, "DATA": run / "dataset/corpus_text_document"}
        words = [str(word) for word in ASKED[command]]
        for name, value in names.items():
            words = [word.replace(name, str(value)) for word in words]
        done = called(command, *words, f"{run}/{path}")
        if command == "convert.to_gguf":  # llama.cpp needs merges
            assert "gguf" in done.stderr or f"{meant or path}: has no tokenizer" in done.stderr
        else:
            assert done.returncode == 0, done.stderr
            assert found == ({meant} if meant else set()), path


def test_no_other_command_takes_a_checkpoint() -> None:
    taking = {name for name in COMMANDS if "--checkpoint" in called(name, "--help").stdout}
    assert taking | {"convert.verify"} == set(ASKED)
