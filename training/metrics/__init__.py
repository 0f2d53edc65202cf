"""Measures and reports a training: curves, FLOPs, memory, timers, TensorBoard and W&B."""
