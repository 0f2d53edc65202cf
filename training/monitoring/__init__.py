"""Watches a training run: stop requests, heartbeats, loss spikes, non-finite numbers, the claim on a model folder."""
