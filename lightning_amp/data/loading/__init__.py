"""Files -> batches: data module, dataset, sampler."""
