"""Measure a model: `loss` on any data, `lambada`'s last-word accuracy, `wikitext`'s word perplexity.

`scoring` holds what they share, `data` opens what they read.
"""
