"""Make a checkpoint of ours that a training resumes from, from Megatron, DeepSpeed or Hugging Face.

    python -m convert.from_megatron --checkpoint gpt2-345m --config my.yaml --model gpt2_345m
    python -m convert.from_megatron --checkpoint run --config my.yaml --model m train.iterations=9

Writes RUN/models/NAME/iter_*, for the data and settings of that model in the configuration; its
sizes must be those of the checkpoint. `python -m training.train` with the same configuration
continues there, in any layout.

Weights are always converted. The moments of train.optimizer are converted if the source names all
of them: those of AdamW and Muon in Megatron-core's torch_dist and ours, of Adam in DeepSpeed's
ZeRO. Otherwise they start from zero, the learning rate starts with its warm-up, and the command
says so. The order of the data is this toolkit's.
"""

import sys
from collections.abc import Sequence

from common import cli
from common.console import note
from common.errors import CheckpointError
from common.run_card import NAME as CARD
from common.run_card import write_card
from convert import command
from convert.arguments import options_of
from training.model_folder import checkpoint_folders


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.from_megatron", __doc__)
    command.add_source(parser)
    cli.add_model_settings(parser)
    arguments = parser.parse_args(argv)
    settings, name = cli.read_settings(arguments), arguments.model
    folder = settings.model_folder(name)
    if older := checkpoint_folders(folder):
        raise CheckpointError(
            f"{folder}: has checkpoints already ({older[0].name}); convert under another model name, or move them away"
        )
    from convert.proof import prove_source
    from convert.sources import find
    from convert.targets import ours
    from training.checkpoint.lookup import discard
    from training.planning.run import make_plan

    plan = make_plan(settings, name)
    source = find.open_source(arguments.checkpoint, options_of(arguments))
    ours.check_fits(source, plan.experiment, name)
    command.announce(source)
    progress, iterations = ours.progress(source, plan), plan.experiment.train.iterations
    if progress.iteration >= iterations:
        note(f"models.{name}.train.iterations is {iterations}; raise it to train further")
    written = ours.write(source, folder, plan)
    try:
        proof = prove_source(source, find.open_source(written))
    except BaseException:
        discard(written)
        (folder / "latest").unlink(missing_ok=True)
        raise
    write_card(written / CARD, inputs=[arguments.checkpoint])
    print(
        f"{written}: weights, {ours.describe_moments(source, plan.experiment.train.optimizer)}; iteration "
        f"{progress.iteration}, {progress.consumed_samples} samples consumed; {proof}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
