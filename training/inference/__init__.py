"""Use a trained model on one device: load it, cache its keys and values, sample texts."""
