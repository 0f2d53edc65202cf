"""Make a checkpoint of ours that a training resumes from, from Megatron, DeepSpeed or Hugging Face.

    python -m convert.from_megatron --checkpoint megatron/gpt2-345m --config openwebtext.yaml --model gpt2_345m
    python -m convert.from_megatron --checkpoint deepspeed/run --config config.yaml --model tiny train.iterations=2000

Writes RUN/models/NAME/iter_*, for the data and settings of that model in the configuration; its sizes must be those of
the checkpoint. `python -m training.train` with the same configuration continues there, in any layout.

Weights are always converted. The moments of train.optimizer are converted if the source names all of them: those of
AdamW and Muon in Megatron-core's torch_dist and ours, of Adam in DeepSpeed's ZeRO. Otherwise they start from zero, the
learning rate starts with its warm-up, and the command says so. The order of the data is this toolkit's.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common import cli
from common.console import note
from common.errors import CheckpointError
from common.run_card import NAME as CARD
from common.run_card import write_card
from common.settings import Experiment, Settings
from convert import arguments as flags
from convert.arguments import Options
from training.model_folder import checkpoint_folders

if TYPE_CHECKING:
    from convert.sources.source import Source


def convert(settings: Settings, name: str, path: Path, options: Options) -> str:
    """Write and prove the checkpoint; returns one line about what was done."""
    from convert.proof import prove_source
    from convert.sources.find import open_source
    from convert.targets import ours
    from training.checkpoint.lookup import discard
    from training.planning.run import make_plan

    folder = settings.model_folder(name)
    if found := checkpoint_folders(folder):
        raise CheckpointError(
            f"{folder}: has checkpoints already ({found[0].name}); convert under another model name, or move them away"
        )
    plan = make_plan(settings, name)
    source = open_source(path, options)
    _check_fits(source, plan.experiment, name)
    flags.announce(source)
    progress, iterations = ours.progress(source, plan), plan.experiment.train.iterations
    if progress.iteration >= iterations:
        note(f"models.{name}.train.iterations is {iterations}; raise it to train further")
    written = ours.write(source, folder, plan)
    try:
        proof = prove_source(source, open_source(written))
    except BaseException:
        discard(written)
        (folder / "latest").unlink(missing_ok=True)
        raise
    write_card(written / CARD, inputs=[path])
    optimizer = plan.experiment.train.optimizer
    state = f"no optimiser state for {optimizer}: it starts from zero, and the learning rate with its warm-up"
    if source.has_moments(optimizer):
        state = f"optimiser state for {optimizer} after {source.step} steps"
        if source.estimated and optimizer == "muon":
            state += f" (the second moment of {', '.join(source.estimated)}, which Muon updated there, is estimated)"
    return (
        f"{written}: weights, {state}; iteration {progress.iteration}, {progress.consumed_samples} samples consumed; "
        f"logits equal the source's within {proof.relative_difference:.1e} of the largest"
    )


def _check_fits(source: "Source", experiment: Experiment, name: str) -> None:
    """CheckpointError if our GPT-2 with the settings of the model `name` is not the source's model."""
    found, wanted = source.model, experiment.model
    for key, theirs, ours, flag in (
        ("n_layer", found.n_layer, wanted.n_layer, ""),
        ("n_head", found.n_head, wanted.n_head, ", or give --num-heads"),
        ("n_embd", found.n_embd, wanted.n_embd, ""),
        ("seq_len", found.n_positions, wanted.seq_len, ""),
        ("vocab_size", found.vocab_size, wanted.vocab_size, ", or give --vocab-size"),
    ):
        if theirs != ours:
            raise CheckpointError(
                f"{source.path}: has {key} {theirs}, but models.{name}.model.{key} is {ours}; set it to {theirs}{flag}"
            )
    for what, theirs_, ours_ in (
        ("MLP width", found.n_inner, 4 * wanted.n_embd),
        ("activation", found.activation.replace("gelu_pytorch_tanh", "gelu_new"), "gelu_new"),
        ("LayerNorm epsilon", found.layer_norm_epsilon, 1e-5),
        ("tied head", found.tied, True),
    ):
        if theirs_ != ours_:
            raise CheckpointError(f"{source.path}: {what} is {theirs_}; this toolkit trains {ours_} only")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.from_megatron", __doc__)
    flags.add_source(parser)
    cli.add_model_settings(parser)
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    print(convert(settings, arguments.model, arguments.checkpoint, flags.options(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
