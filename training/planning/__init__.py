"""Predicts the memory and speed of a layout, and finds the best layouts; arithmetic without torch.

`layout` has the data: a workload, its layouts, a request. `machines` says what it runs on. `memory`
and `speed` predict, `search` ranks, `fit` and `run` judge a job, and `table` prints.
"""
