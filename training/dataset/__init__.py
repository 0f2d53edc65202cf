"""Token datasets: samples of a fixed length, blends, and batches in an order that the seed fixes."""
