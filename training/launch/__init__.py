"""How one process becomes a rank of a job: its rank, the rendezvous, the process group, preflight, and failures."""
