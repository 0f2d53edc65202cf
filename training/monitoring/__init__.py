"""What watches a training run: stop requests, heartbeats, spikes, the claim on a model folder."""
