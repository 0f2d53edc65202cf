"""Tensors in files of any origin: found without executing anything, read where they lie."""
