"""Scores of a model: held-out loss, LAMBADA, WikiText-103."""
