"""Check that ranks agree on parameters, buffers, batches and random numbers; warn or raise if they do not."""
