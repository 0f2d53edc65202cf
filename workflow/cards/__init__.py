"""Dataset and model cards of a finished run, for publication."""
