"""Measure a model: the loss on any data (`scoring`), `lambada`'s last-word accuracy, `wikitext`'s word perplexity."""
