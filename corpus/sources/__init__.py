"""Readers of existing text, a module per family of formats; `corpus.sources.formats` has the table of formats."""
