"""Pipelines: where layers are cut into stages, how many micro-batches, and what a schedule takes in time and bytes."""
