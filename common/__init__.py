"""Shared by every command: settings, errors, files, statistics, progress, workers, tokenizer.

Every other package may import it; it imports none of them.
"""
