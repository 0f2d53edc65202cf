"""Checkpoints: complete or absent, and loadable in any parallel layout.

MODEL_FOLDER/iter_0000100/
    rank_0_0.safetensors …   parts of tensors, written by all ranks
    tensors.json             the parts of each tensor
    manifest.json            written last: sizes, XXH3 hashes, settings, position in the data
MODEL_FOLDER/latest          the name of the newest checkpoint, for people and scripts
MODEL_FOLDER/best            with `train.keep_best`, the name of the one with the lowest loss
"""

from training.checkpoint.lookup import check_fits, newest, resolve
from training.checkpoint.manifest import Manifest, Progress, read_manifest, verify
from training.checkpoint.parts import held_shards, load, load_weights, state_tensors
from training.checkpoint.replicas import Replicas, compare_replicas
from training.checkpoint.writing import SavedRun, write

__all__ = [
    "Manifest",
    "Progress",
    "Replicas",
    "SavedRun",
    "check_fits",
    "compare_replicas",
    "held_shards",
    "load",
    "load_weights",
    "newest",
    "read_manifest",
    "resolve",
    "state_tensors",
    "verify",
    "write",
]
