"""Write DeepSpeed's universal checkpoints from the layout table, as deepspeed.checkpoint.ds_to_universal makes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.convert.deepspeed_files import STEP, Run, Tensors, rank_tensors, write_tag


def write_universal(folder: Path, run: Run) -> Path:
    """A universal checkpoint that was converted from `run`; flat tensors from ZeRO 3."""
    write_tag(folder, run)
    for path in [*folder.glob("*optim_states.pt"), *folder.glob("layer_*")]:
        path.unlink()
    stages = rank_tensors(run)
    zero = folder / "zero"
    for number, ranks in enumerate(stages):
        for key in ranks[0]:
            if number and (zero / key).exists():
                continue  # tied, and taken from the first stage
            tensor, vocabulary = _merged(key, ranks, run)
            (zero / key).mkdir(parents=True)
            for kind, factor in (("fp32", 1.0), ("exp_avg", -1.0), ("exp_avg_sq", 0.25)):
                value: Any = {"param": tensor * factor, "cat_dim": 0, **({"vocab_tensor": True} if vocabulary else {})}
                torch.save(tensor.flatten() * factor if run.stage == 3 else value, zero / key / f"{kind}.pt")
            if run.stage < 3:
                torch.save(torch.tensor(float(STEP)), zero / key / "step.pt")
    if not run.megatron and run.stage < 3:  # the model's second name, from its 16-bit weights
        (zero / "lm_head.weight").mkdir()
        weight = stages[0][0]["transformer.wte.weight"].bfloat16().float()
        torch.save({"param": weight}, zero / "lm_head.weight" / "fp32.pt")
    state = {"optimizer_state_dict": {"state": {0: {"step": torch.tensor(float(STEP))}}}} if run.stage == 3 else {}
    torch.save({"zero_stage": run.stage, **state, "param_groups": [{"lr": 1.0}]}, zero / "optimizer_state.pt")
    return folder


def _merged(key: str, ranks: Sequence[Tensors], run: Run) -> tuple[Tensor, bool]:
    """As ds_to_universal joins it: replicas once, row-parallel matrices on dimension 1, no padded vocabulary."""
    tensors = [rank[key] for rank in ranks]
    if "word_embeddings" in key and run.stage < 3:  # from ZeRO 3 all rows are kept
        return torch.cat(tensors)[: run.model.vocab_size], True
    if any(
        part in key for part in ("layernorm", "position", "dense.bias", "4h_to_h.bias", "ln_", "c_proj.bias", "wpe")
    ):
        return tensors[0], False
    if key.split(".")[0].isdigit() and key.count(".") == 1:
        return tensors[0], False
    row_parallel = ("dense.weight", "4h_to_h.weight")
    return torch.cat(tensors, dim=int(key.endswith(row_parallel))), False
