"""Convert checkpoints: `python -m convert.merge_mp` merges any layout into one Hugging Face folder."""

import os

# Both are read once, when PyTorch is imported.
# Large tensors in huge pages: the kernel takes longer to map and clear 4 KB pages than to read the tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Threads that wait for each other sleep: where other work shares the cores, such as on a login node, the proof's small
# products otherwise spend 5 times as long in waiting loops.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
