"""The offline demo: a small web site built from Python's documentation, and a loopback server for it.

No other package depends on the site; any folder in the same format (`workflow.demo.serve`) can be scraped instead.
"""
