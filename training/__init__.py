"""GPT-2: the model, parallel layouts, data order, checkpoints, training, evaluation and generation.

Commands: `python -m training.train | evaluate | generate`. Start reading at `trainer.py`.
"""
