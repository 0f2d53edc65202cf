"""Convert checkpoints of any origin; `convert.merge_mp` makes a Hugging Face folder of them."""

import os

# PyTorch reads both when it is imported.
# Large tensors in huge pages: mapping and clearing 4 KB pages takes longer than reading the tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Waiting threads sleep: on shared cores, such as a login node's, the proof's small products
# otherwise take 5 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
