"""A trained model, loaded for inference on one device, and its cache of keys and values."""
