"""Make training batches from files: data module, dataset and sampler."""
