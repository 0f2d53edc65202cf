"""The configuration of a model's architecture and of its parallel layout."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.section import Need, NonNegativeInt, PositiveInt, Section, Size


class ModelSettings(Section):
    """Architecture of a GPT-2."""

    n_layer: Annotated[int, Field(gt=0, le=10_000)]
    """Transformer blocks."""
    n_head: Size
    """Attention heads per layer; must divide n_embd."""
    n_embd: Annotated[int, Field(gt=0, le=2**20)]
    """Width of the residual stream."""
    seq_len: Size = 1024
    """Context length, in tokens."""
    vocab_size: Size = 50257
    """Number of vocabulary entries; the layout pads them to a multiple of 128 x parallel.tensor."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Dropout probability of embeddings, attention weights and residual branches in training."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}; choose a divisor")
        return self

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block: attention has 4 squares of the width, the MLP 8."""
        return 12 * self.n_embd**2 + 13 * self.n_embd

    @property
    def parameters(self) -> int:
        """Parameters of the model, with a tied head."""
        embeddings = (self.vocab_size + self.seq_len) * self.n_embd
        return self.n_layer * self.layer_parameters + embeddings + 2 * self.n_embd  # and the last LayerNorm


class ParallelSettings(Section):
    """Parallel layout: world size = pipeline x data x tensor. `auto`: the planner chooses it."""

    auto: bool = False
    """Let the planner choose the other keys, train.recompute, and train.micro_batch_size if it is
    0, when the training starts; `parallel: auto` is short for it. Needs train.global_batch_size."""
    gpus: Annotated[NonNegativeInt, Need("parallel.auto", lambda parallel: parallel.auto, refused=True)] = 0
    """With auto: number of processes, one per GPU. 0: one node, or as many as were started."""
    tensor: PositiveInt = 1
    """Tensor-parallel ranks; must divide n_head."""
    sequence_parallel: Annotated[bool, Need("parallel.tensor 2 or more", lambda parallel: parallel.tensor > 1)] = False
    """Split LayerNorm, dropout and residuals along the sequence over tensor-parallel ranks."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel ranks; each has a stage of consecutive layers, or virtual_stages."""
    schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved_1f1b"],
        Need("parallel.pipeline 2 or more", lambda parallel: parallel.pipeline > 1),
    ] = "1f1b"
    """Order in which the pipeline runs its micro-batches."""
    virtual_stages: PositiveInt = 1
    """Stages per rank with interleaved_1f1b: smaller bubbles, more communication."""
    data: PositiveInt = 1
    """Data-parallel ranks."""
    zero_stage: Annotated[
        int, Field(ge=0, le=3), Need("parallel.data 2 or more", lambda parallel: parallel.data > 1)
    ] = 0
    """What data-parallel ranks shard: 1 optimiser state, 2 also gradients, 3 also parameters."""
    offload: Annotated[
        bool,
        Need(
            "parallel.zero_stage 1, 2 or 3 and parallel.data 2 or more",
            lambda parallel: parallel.zero_stage and parallel.data > 1,
            refused=True,
        ),
    ] = False
    """Keep parameters, gradients and optimiser state in CPU memory (GPUs only, ZeRO 1 to 3)."""

    @model_validator(mode="after")
    def _auto_is_alone(self) -> Self:
        fields = type(self).model_fields
        fixed = [key for key in self.model_fields_set - {"auto", "gpus"} if getattr(self, key) != fields[key].default]
        if self.auto and fixed:
            raise ValueError(f"auto chooses {fixed[0]}, too; leave it out, or set auto to false")
        return self

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.schedule == "interleaved_1f1b" and self.pipeline == 1:
            raise ValueError("schedule interleaved_1f1b needs pipeline 2 or more; without a pipeline, omit schedule")
        if (self.virtual_stages > 1) != (self.schedule == "interleaved_1f1b"):
            raise ValueError(
                f"virtual_stages {self.virtual_stages} with schedule {self.schedule}: "
                "interleaved_1f1b needs 2 or more, the others 1"
            )
        return self

    def takes(self, micro_batches: int) -> bool:
        """Whether the schedule runs this many micro-batches per step and rank (PyTorch's rules)."""
        if self.pipeline == 1 or self.schedule == "gpipe":
            return True
        if self.schedule == "1f1b":
            return micro_batches >= self.pipeline
        return micro_batches % max(1, micro_batches // self.pipeline) == 0

    @property
    def world_size(self) -> int:
        """Processes of the job; with auto, those requested, or 0 if not known yet."""
        if self.auto:
            return self.gpus
        return self.pipeline * self.data * self.tensor

    @property
    def factors(self) -> str:
        """`pipeline 1 x data 2 x tensor 4 = 8 processes`."""
        if self.auto:
            return f"auto over {self.gpus} processes"
        return f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor} = {self.world_size} processes"
