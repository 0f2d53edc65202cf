"""One command that builds, tests and times everything that needs a GPU: `python -m benchmarks.gpu`.

`__main__` is the command, `parts` says what it does in which order, and each other module is one part or its tool.
"""
