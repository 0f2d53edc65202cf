"""GPT-2: the model, its parallel layout, data order, checkpoints, training, evaluation and generation.

`python -m training.train | evaluate | generate`. Written for one device; parallelism is applied from outside.
"""
