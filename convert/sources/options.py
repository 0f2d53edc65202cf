"""What a person may have to say about a checkpoint that does not say it itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The flags of merge_mp that decide how a source is read; None: what the source says."""

    iteration: int | None = None
    num_heads: int | None = None
    qkv_version: int | None = None
    vocab_size: int | None = None
    activation: str | None = None
