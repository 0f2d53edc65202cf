"""Every claim about speed or quality as a command that prints a table, beside a named peer in the same run.

`python -m benchmarks.<area> <name>`; nothing here is needed to run the toolkit.
"""
