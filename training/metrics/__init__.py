"""What a training run measures: curves, FLOPs, memory, timers, TensorBoard and W&B."""
