"""Token datasets: samples of one length, blends of corpora, batches in the order of a seed."""
