"""Use a trained model on one device: `load` it, `kv_cache` its keys and values, continue texts by `sampling`."""
