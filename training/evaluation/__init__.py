"""Measures a model: loss on any data (`scoring`), tasks of lm-evaluation-harness (`harness`)."""
