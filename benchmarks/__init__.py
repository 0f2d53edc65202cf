"""Measures every claim about speed or quality against a named peer in the same run, and prints a table.

`python -m benchmarks.<area> <name>`; the toolkit itself needs nothing from here.
"""
