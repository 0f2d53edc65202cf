"""CUDA kernels for what the compiler leaves on the table, each op beside its PyTorch reference.

`build.py` compiles csrc/, `library.py` calls it and knows which kernels are used. Nothing here
needs a GPU.
"""
