"""Makes batches of files: data module, dataset and sampler."""
