"""A trained model on one device: `load` it, cache keys and values, continue texts by `sampling`."""
