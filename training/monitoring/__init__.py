"""Watches a training: stop requests, heartbeats, loss spikes, NaN, the lock on its folder."""
