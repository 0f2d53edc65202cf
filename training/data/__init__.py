"""What a model is trained on: samples of a dataset in their order, blends of datasets, batches of samples."""
