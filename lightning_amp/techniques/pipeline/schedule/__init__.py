"""Schedule pipelines: the cut of layers into stages, the number of micro-batches, times and bytes."""
