"""Readers of existing text; `corpus.sources.formats` has the table of formats."""
