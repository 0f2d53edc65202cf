"""The offline demo: a small web site built from Python's documentation, and its loopback server."""
