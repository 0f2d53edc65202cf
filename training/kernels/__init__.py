"""CUDA kernels for what the compiler leaves on the table, each beside its PyTorch reference in one file per op.

`build.py` compiles csrc/, `library.py` calls it and knows which kernels are used. Nothing here needs a GPU.
"""
