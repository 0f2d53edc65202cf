"""What looks after a run that is left alone: bad numbers, requests to stop, other jobs, silence."""
