"""Measure a model: loss on any data, LAMBADA's last-word accuracy, WikiText's word perplexity."""
