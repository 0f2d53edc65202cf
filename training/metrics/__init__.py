"""Measures and reports a training run: curves, FLOPs, memory, timers, TensorBoard and W&B."""
