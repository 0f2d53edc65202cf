"""Measure a model: its loss on any data (`scoring`), and tasks of lm-evaluation-harness (`harness`)."""
