"""Check that ranks agree on parameters, buffers, batches and random numbers, or end the run."""
