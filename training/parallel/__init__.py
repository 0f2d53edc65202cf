"""Parallel layouts, applied to the model from outside, and the processes of a job. Start at `layout.parallelize`."""
