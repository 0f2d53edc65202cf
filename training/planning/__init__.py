"""Predicts the memory and the speed of a layout, and finds the best ones; arithmetic without torch.

`workload` is what is trained, `machines` on what, `layout` how; `memory` and `speed` predict, `search` ranks.
"""
