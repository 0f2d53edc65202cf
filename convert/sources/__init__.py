"""Checkpoints of every origin: a file per format; `find.open_source` detects the format."""
