"""CUDA kernels, each op beside its PyTorch reference. Nothing here needs a GPU.

`build.py` compiles csrc/, `library.py` calls it and knows which kernels are used.
"""
