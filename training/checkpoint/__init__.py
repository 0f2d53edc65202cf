"""Checkpoints that are whole or absent, and fit every layout: written (`saving`), described (`manifest`), found again
(`finding`), thinned out (`keeping`).

    RUN/iter_0000100/   __0_0.distcp …   tensors, written by all ranks (torch.distributed.checkpoint)
                        .metadata        where each tensor lies in them
                        manifest.json    written last: sizes, sha256, settings, position in the data
    RUN/latest          the name of the newest one, for people and scripts
"""

from training.checkpoint.lookup import check_fits, newest, resolve
from training.checkpoint.manifest import Manifest, Progress, read_manifest, verify
from training.checkpoint.replicas import Replicas, compare_replicas
from training.checkpoint.retention import prune
from training.checkpoint.saving import copy_tensors, load, read_weights, tensors_of, write
from training.model_folder import iteration_folder, iterations

__all__ = [
    "Manifest",
    "Progress",
    "Replicas",
    "check_fits",
    "compare_replicas",
    "copy_tensors",
    "iteration_folder",
    "iterations",
    "load",
    "newest",
    "prune",
    "read_manifest",
    "read_weights",
    "resolve",
    "tensors_of",
    "verify",
    "write",
]
