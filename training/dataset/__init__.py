"""Token datasets: samples of a fixed length, blends of corpora, and batches in an order fixed by the seed."""
