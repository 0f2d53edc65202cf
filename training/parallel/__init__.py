"""Parallel layouts, applied to the model from outside. Start at `layout.parallelize`."""
