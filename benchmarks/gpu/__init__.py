"""Builds, tests and times everything that needs a GPU: `python -m benchmarks.gpu`."""
