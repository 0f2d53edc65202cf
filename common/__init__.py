"""Shared by every command: settings, errors, files, statistics, progress, workers and the GPT-2 tokenizer.

Every other package may import it; it imports none of them.
"""
