"""Measures each claim about speed or quality against a named peer in the same run; prints tables.

`python -m benchmarks.<area> <name>`; the toolkit itself needs nothing from here.
"""
