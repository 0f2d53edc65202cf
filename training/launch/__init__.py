"""Makes one process a rank of a job: rank, rendezvous, process group, preflight, and failures."""
